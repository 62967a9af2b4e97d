"""Curves as lines that can be drawn: with gaps, and with no more points than can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

Line = list[tuple[float, float]]


def outline(xs: Sequence[float], ys: Sequence[float], columns: int) -> list[Line]:
    """The lines to draw for the points ``xs`` and ``ys``, which are interrupted where values are not finite.

    Of more points than four for each of so many ``columns`` between the first and the last x, the first, the lowest,
    the highest and the last in each column remain: drawn, that looks the same, spikes included.
    """
    points = list(zip(xs, ys, strict=True))
    if len(points) > 4 * columns:
        points = list(_thinned(points, columns))
    lines: list[Line] = [[]]
    for x, y in points:
        if math.isfinite(y):
            lines[-1].append((x, y))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def _thinned(points: Line, columns: int) -> Iterator[tuple[float, float]]:
    low, high = min(points)[0], max(points)[0]
    width = (high - low) / columns or 1.0
    for _, group in groupby(points, key=lambda point: int((point[0] - low) / width)):
        column = list(group)
        finite = [point for point in column if math.isfinite(point[1])]
        if not finite:
            yield column[0]
            continue
        # By their places, so that they stay in order and none comes twice.
        order = range(len(finite))
        lowest = min(order, key=lambda index: finite[index][1])
        highest = max(order, key=lambda index: finite[index][1])
        yield from (finite[index] for index in sorted({0, lowest, highest, len(finite) - 1}))
