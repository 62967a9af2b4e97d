"""A chart of one metric: what is drawn, whether as characters or as a picture. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from slurmtrain.model.metrics.curves import Curve, Points

# Units of a time axis, in seconds, and the least span for each.
_UNITS = (
    ("days", 86400.0, 3 * 86400.0),
    ("hours", 3600.0, 3 * 3600.0),
    ("minutes", 60.0, 180.0),
    ("seconds", 1.0, 0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How curves are shown.

    ``by_time``: over the time since the run first started, not over steps. ``log``: on a logarithmic scale.
    ``columns``: how many columns can be told apart.
    """

    by_time: bool = False
    log: bool = False
    columns: int = 160


@dataclass(frozen=True, slots=True)
class Series:
    """The curve of one run, or the mean of several. ``since``: when it first started, in seconds since 1970.

    ``starts``: where each further attempt began: its step, if known, and when, in seconds since 1970. ``bounds``: if
    the curve is a mean, the least and the largest of the averaged values.
    """

    label: str
    curve: Curve
    since: float
    starts: Sequence[tuple[int | None, float | None]] = ()
    bounds: Sequence[Points] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The lines of one run, or of the mean of several. ``faint``: what was superseded; the least and largest values."""

    label: str
    lines: Sequence[Line]
    faint: Sequence[Line] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn.

    ``marks``: where attempts began, on the x axis. ``log``: y values are logarithms to base 10.
    """

    title: str
    x_label: str
    traces: Sequence[Trace]
    marks: Sequence[float]
    log: bool

    @property
    def limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The lowest and highest x, and y, with something between them."""
        points = [point for trace in self.traces for line in (*trace.lines, *trace.faint) for point in line]
        xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
        return _widened(min(xs), max(xs)), _widened(min(ys), max(ys))


def _widened(low: float, high: float) -> tuple[float, float]:
    # A constant curve has no extent that it could be scaled by.
    margin = abs(low) * 0.1 or 1.0
    return (low, high) if high > low else (low - margin, high + margin)


def make_chart(metric: str, series: Sequence[Series], view: View) -> Chart:
    """The chart of a ``metric``, with a line for each of the ``series``, in this ``view``.

    Attempts are marked if there is only one.
    """
    span = max((points.times[-1] - each.since for each in series if len(points := each.curve.kept)), default=0.0)
    # The last unit takes any span: by the clocks of different nodes it may even be negative.
    unit, seconds = next((name, size) for name, size, least in _UNITS if span >= least or size == 1.0)
    divisor = seconds if view.by_time else 0.0
    traces = [
        Trace(each.label, _outlined(each.curve.kept, each, view, divisor), list(_faint(each, view, divisor)))
        for each in series
    ]
    marks: list[float] = []
    for step, time in series[0].starts if len(series) == 1 else ():
        if divisor and time is not None:
            marks.append((time - series[0].since) / divisor)
        elif not divisor and step is not None:
            marks.append(float(step))
    return Chart(metric, unit if view.by_time else "step", traces, marks, view.log)


def _outlined(points: Points, series: Series, view: View, divisor: float) -> list[Line]:
    """The lines of some ``points``; ``divisor``: seconds of the time axis' unit, 0 for steps."""
    values: Sequence[float] = points.values
    if view.log:
        values = [math.log10(value) if value > 0 else math.nan for value in values]
    xs: Sequence[float] = [(time - series.since) / divisor for time in points.times] if divisor else points.steps
    return outline(xs, values, view.columns)


def _faint(series: Series, view: View, divisor: float) -> Iterator[Line]:
    """The lines of bounds, and of what was superseded: one for each time that the run was rolled back."""
    for bound in series.bounds:
        yield from _outlined(bound, series, view, divisor)
    for part in rollbacks(series.curve):
        yield from _outlined(part, series, view, divisor)


def rollbacks(curve: Curve) -> Iterator[Points]:
    """The superseded points of a curve by rollback."""
    kept = sorted(curve.kept.times)
    part = Points()
    for row in curve.superseded.rows():
        attempt, step, time, _ = row
        # Steps of one rollback increase, and nothing that was logged among them is kept.
        if len(part) and (
            step <= part.steps[-1]
            or attempt != part.attempts[-1]
            or bisect_right(kept, part.times[-1]) != bisect_left(kept, time)
        ):
            yield part
            part = Points()
        part.append(*row)
    if len(part):
        yield part


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between ``low`` and ``high``, multiples of 1, 2 or 5 times a power of ten: about ``most``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    least = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)
    # Rounding must not lose a tick that lies on a limit.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)][: most + 1]


def tick_text(value: float) -> str:
    """A number on an axis, to four figures; large ones with k, M or G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.4g}{letter}"
    return f"{value:.4g}"


Line = list[tuple[float, float]]


def outline(xs: Sequence[float], ys: Sequence[float], columns: int) -> list[Line]:
    """The lines to draw for the points ``xs`` and ``ys``, which are interrupted where values are not finite.

    Of more points than can be told apart in so many ``columns``, :func:`thinned` chooses.
    """
    lines: list[Line] = [[]]
    for place in thinned(xs, ys, columns):
        if math.isfinite(ys[place]):
            lines[-1].append((xs[place], ys[place]))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def thinned(xs: Sequence[float], ys: Sequence[float], columns: int) -> Sequence[int]:
    """The places, in order, of points that look like all of ``xs`` and ``ys`` when they are drawn, spikes included.

    Of more points than four for each of so many ``columns`` between the first and the last x, these are the first, the
    lowest, the highest and the last in each column.
    """
    # More could not be told apart, and would take seconds to draw.
    if len(xs) <= 4 * columns:
        return range(len(xs))
    low, high = min(xs), max(xs)
    # All points may have the same x.
    width = (high - low) / columns or 1.0
    chosen: list[int] = []
    for _, group in groupby(range(len(xs)), key=lambda place: int((xs[place] - low) / width)):
        column = list(group)
        finite = [place for place in column if math.isfinite(ys[place])]
        if not finite:
            chosen.append(column[0])
            continue
        lowest, highest = min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)
        chosen += sorted({finite[0], lowest, highest, finite[-1]})
    return chosen
