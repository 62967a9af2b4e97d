"""The history of a run's metrics, over all of its attempts, without what was rolled back.

An attempt, or the ranks restarted inside of one, resume from a checkpoint and train the steps after it again. What was
logged for these steps before is superseded: it belongs to a training that led nowhere. What remains of a metric has
each step once, in increasing order, as if the run had never been interrupted.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmtrain.model.run.progress import Point
from slurmtrain.model.run.run import Attempt


class Restart(NamedTuple):
    """Ranks were restarted inside an attempt, ``at`` seconds since 1970, from ``step``; None: that is not known."""

    at: float
    step: int | None


class AttemptStart(NamedTuple):
    """An attempt: its number, the step that it resumed from (None: unknown), and the restarts inside of it."""

    number: int
    step: int | None = None
    restarts: Sequence[Restart] = ()


def start_of(attempt: Attempt) -> AttemptStart:
    """What is known about where an attempt and its restarts resumed.

    Only the first and the last step that its ranks resumed from are known; the first points after the other restarts
    show it too.
    """
    last = len(attempt.restarts) - 1
    restarts = [
        Restart(float(restart["at"]), attempt.round_step if index == last else None)
        for index, restart in enumerate(attempt.restarts)
    ]
    return AttemptStart(attempt.number, attempt.first_step, restarts)


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

    def move_from(self, step: int, to: Points | None) -> None:
        """Remove the points of ``step`` and later ones from the end, and add them ``to`` others if they are given."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] >= step:
            keep -= 1
        if to is not None:
            for index in range(keep, len(self.steps)):
                to.append(self.attempts[index], self.steps[index], self.times[index], self.values[index])
        del self.attempts[keep:], self.steps[keep:], self.times[keep:], self.values[keep:]

    def rows(self) -> Iterator[tuple[int, int, float, float]]:
        """Each point: attempt, step, time, value."""
        return zip(self.attempts, self.steps, self.times, self.values, strict=True)


@dataclass(slots=True)
class Curve:
    """A metric. ``kept``: what survives; ``superseded``: what was trained again, in the order in which it was."""

    kept: Points = field(default_factory=Points)
    superseded: Points = field(default_factory=Points)


class CurveBuilder:
    """Builds the curves of a run from its points: attempt by attempt, in the order in which they were logged."""

    def __init__(self, names: Collection[str] | None = None, *, keep_superseded: bool = False) -> None:
        """``names``: the metrics that matter; None: all. ``keep_superseded``: note superseded points too."""
        self.curves: dict[str, Curve] = {}
        self._names = names
        self._keep_superseded = keep_superseded
        self._attempt = 0
        self._restarts: list[Restart] = []
        # The step that the newest point belongs to, and whether the ranks may have resumed from anywhere since.
        self._step = 0
        self._resumed = False

    def add_attempt(self, start: AttemptStart, points: Iterable[Point]) -> None:
        """Add the points of the next attempt, which began at ``start``."""
        self._attempt, self._restarts = start.number, sorted(start.restarts, reverse=True)
        self._resume(start.step)
        for point in points:
            while self._restarts and point.time >= self._restarts[-1].at:
                self._resume(self._restarts.pop().step)
            self._add(point)
        while self._restarts:
            self._resume(self._restarts.pop().step)

    def _resume(self, step: int | None) -> None:
        """The ranks have resumed from this step. 0 may also mean that they have not restored their checkpoint yet."""
        self._resumed = True
        if step:
            self._roll_back(step + 1)
            self._step = step

    def _add(self, point: Point) -> None:
        # Several lines of one step, such as that of an evaluation after it, are no rollback.
        if point.step < self._step or (self._resumed and point.step == self._step):
            self._roll_back(point.step)
        self._step, self._resumed = point.step, False
        for name, value in point.metrics.items():
            if self._names is None or name in self._names:
                self._put(name, point, float(value))

    def _put(self, name: str, point: Point, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve()
        if curve.kept.steps and curve.kept.steps[-1] >= point.step:
            curve.kept.move_from(point.step, self._superseded(curve))
        curve.kept.append(self._attempt, point.step, point.time, value)

    def _roll_back(self, step: int) -> None:
        """Drop what was logged for ``step`` and later steps."""
        for curve in self.curves.values():
            curve.kept.move_from(step, self._superseded(curve))

    def _superseded(self, curve: Curve) -> Points | None:
        return curve.superseded if self._keep_superseded else None
