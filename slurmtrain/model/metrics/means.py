"""The mean of a metric over runs that repeat each other, at each step. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from slurmtrain.model.metrics.curves import Points


@dataclass(slots=True)
class MeanCurve:
    """The mean of a metric over several runs, in columns, with the least and the largest value at each step.

    Times are in seconds since the start of each run. ``counts``: how many runs have a value at each step.
    """

    means: Points = field(default_factory=Points)
    lows: Points = field(default_factory=Points)
    highs: Points = field(default_factory=Points)
    counts: list[int] = field(default_factory=list)


def mean_curve(curves: Sequence[tuple[Points, float]]) -> MeanCurve:
    """The mean over some runs at each step at which any of them has a value.

    Values that are not a number count only where no run has another one.

    Args:
        curves: The points of each run that survive, and when it started, in seconds since 1970.
    """
    result = MeanCurve()
    rows = heapq.merge(*(_rows(points, since) for points, since in curves))
    for step, group in groupby(rows, key=lambda row: row[0]):
        at_step = list(group)
        time = math.fsum(time for _, time, _ in at_step) / len(at_step)
        values = [value for _, _, value in at_step if not math.isnan(value)] or [math.nan]
        result.means.append(1, step, time, sum(values) / len(values))
        result.lows.append(1, step, time, min(values))
        result.highs.append(1, step, time, max(values))
        result.counts.append(len(at_step))
    return result


def _rows(points: Points, since: float) -> Iterator[tuple[int, float, float]]:
    """Each point: step, seconds since the start, value."""
    return ((step, time - since, value) for _, step, time, value in points.rows())
