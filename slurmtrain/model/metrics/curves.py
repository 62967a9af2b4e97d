"""The history of a run's metrics, over all of its attempts, without what was rolled back.

What remains of a metric has each step once, in increasing order, as if the run had never been interrupted
(:mod:`.survival`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from slurmtrain.model.metrics.blocks import Block, block_of, is_increasing
from slurmtrain.model.metrics.survival import AttemptStart, Segment, SurvivingLine
from slurmtrain.model.run.progress import Point


@dataclass(slots=True)
class Points:
    """Values of one metric, in columns: millions of them fit into memory. ``times`` are in seconds since 1970."""

    attempts: array[int] = field(default_factory=lambda: array("i"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, attempt: int, step: int, time: float, value: float) -> None:
        """Add a point: the ``value`` after ``step`` finished steps, logged at ``time`` by an ``attempt``."""
        self.attempts.append(attempt)
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def extend(self, attempt: int, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Add points of one ``attempt``: their ``steps``, ``times`` and ``values``."""
        self.attempts.extend(array("i", [attempt]) * len(steps))
        self.steps.extend(steps)
        self.times.extend(times)
        self.values.extend(values)

    def rows(self) -> Iterator[tuple[int, int, float, float]]:
        """Each point: attempt, step, time, value."""
        return zip(self.attempts, self.steps, self.times, self.values, strict=True)


@dataclass(slots=True)
class Curve:
    """A metric. ``kept``: values that survive; ``superseded``: values that were trained again, in order of replacement.

    Values that were logged again for the same step, without a rollback, come last in ``superseded``.
    """

    kept: Points = field(default_factory=Points)
    superseded: Points = field(default_factory=Points)


class CurveBuilder:
    """Builds the curves of a run from its points: attempt by attempt, in the order of logging."""

    def __init__(self, names: Collection[str] | None = None, *, keep_superseded: bool = False) -> None:
        """``names``: the metrics that matter; None: all. ``keep_superseded``: note superseded points too."""
        self._line = SurvivingLine()
        self._names = names
        self._keep_superseded = keep_superseded

    def add_attempt(self, start: AttemptStart, points: Iterable[Point]) -> None:
        """Add the points of the next attempt, which began at ``start``."""
        self.add_blocks(start, [block_of(points)])

    def add_blocks(self, start: AttemptStart, blocks: Iterable[Block]) -> None:
        """Add the points of the next attempt, which began at ``start``, in columns."""
        self._line.add_attempt(start, blocks)

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of all metrics that were logged, also if nothing of one survives."""
        segments = [*self._line.kept, *self._line.superseded]
        names = dict.fromkeys(name for segment in segments for name in segment.block.columns)
        return {name: self._curve(name) for name in names if self._names is None or name in self._names}

    def _curve(self, name: str) -> Curve:
        curve = Curve()
        superseded = curve.superseded if self._keep_superseded else None
        if superseded is not None:
            for segment in self._line.superseded:
                superseded.extend(segment.attempt, *columns_of(segment, name))
        for segment in self._line.kept:
            steps, times, values = columns_of(segment, name)
            if not len(steps):
                continue
            is_next = not curve.kept.steps or curve.kept.steps[-1] < steps[0]
            if is_next and (segment.block.increases or is_increasing(steps)):
                curve.kept.extend(segment.attempt, steps, times, values)
            else:
                for point in zip(steps, times, values, strict=True):
                    _replace(curve.kept, segment.attempt, *point, superseded)
        return curve


def columns_of(segment: Segment, name: str) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
    """The steps, times and values of the rows of a ``segment`` that have the metric ``name``."""
    block, start, stop = segment.block, segment.start, segment.stop
    column = block.columns.get(name)
    if column is None:
        return (), (), ()
    if column.rows is None:
        return block.steps[start:stop], block.times[start:stop], column.values[start:stop]
    first, end = bisect_left(column.rows, start), bisect_left(column.rows, stop)
    rows = column.rows[first:end]
    return [block.steps[row] for row in rows], [block.times[row] for row in rows], column.values[first:end]


def _replace(kept: Points, attempt: int, step: int, time: float, value: float, superseded: Points | None) -> None:
    """Add a point, in place of one of the same step."""
    if kept.steps and kept.steps[-1] == step:
        point = (kept.attempts.pop(), kept.steps.pop(), kept.times.pop(), kept.values.pop())
        if superseded is not None:
            superseded.append(*point)
    kept.append(attempt, step, time, value)
