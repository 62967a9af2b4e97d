"""Which logged points are settled, so that a tracker can be given them for good.

A tracker has to show the surviving line of a run, and some cannot delete a point. So a point is sent once its fate is
known. It is superseded as soon as a later attempt, or restarted ranks, have resumed from an earlier step. It is final
once nothing resumes from an earlier step any more: a later checkpoint is there to resume from, or the run has ended.
The newest points are neither. Since fates are decided in the order of logging, a tracker's progress is a position in
each metrics file, together with the largest step of the surviving line that it has (:class:`Place`).

A run that has ended may be resumed nevertheless, and a checkpoint may turn out to be damaged. Then a rollback reaches
behind that step, and the tracker has points that no longer survive (:func:`start_over`).
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slurmtrain.model.metrics.curves import AttemptStart, Course
from slurmtrain.model.run.journal_lines import Point
from slurmtrain.model.run.run import Checkpoint


class Fate(enum.Enum):
    """What becomes of a point."""

    FINAL = "final"
    """It belongs to the surviving line."""
    REPLAYED = "replayed"
    """Its step was trained again."""
    OPEN = "open"
    """Either may still happen."""


class LoggedLine(NamedTuple):
    """A line of an attempt's metrics file: its first byte is at ``offset``, the next line's at ``end``."""

    offset: int
    end: int
    point: Point


class Decided(NamedTuple):
    """A line, whose metrics are parted by what becomes of them. ``end``: where the next one begins, in bytes."""

    attempt: int
    offset: int
    end: int
    step: int
    time: float
    parts: Mapping[Fate, Point]


@dataclass(frozen=True, slots=True)
class Place:
    """How far a tracker has a run.

    ``offsets``: the bytes of each attempt's metrics file whose points it has, by attempt; ``step``: the largest step of
    the surviving line that it has, None if it has none; ``until``: the time of the newest of all these points.
    ``reach``: the largest step of the surviving line that it may have, since a command may have been killed while it
    was sending more: the lines from ``sending`` on, an attempt and an offset.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    step: int | None = None
    until: float = 0.0
    reach: int | None = None
    sending: tuple[int, int] = (0, 0)

    @property
    def attempt(self) -> int:
        """The attempt whose points are being sent; 0 before the first point."""
        return max((number for number, offset in self.offsets.items() if offset), default=0)

    def after(self, lines: Sequence[Decided]) -> Place:
        """The place when these settled lines have been sent too."""
        offsets, until, attempt = dict(self.offsets), self.until, self.attempt
        for line in lines:
            # Clocks of the nodes of two attempts need not agree.
            until = line.time if line.attempt > attempt else max(until, line.time)
            attempt = max(attempt, line.attempt)
            offsets[line.attempt] = line.end
        step = _larger(self.step, _final_step(lines))
        return Place(offsets, step, until, step)

    def before(self, lines: Sequence[Decided]) -> Place:
        """The place while these settled lines are being sent."""
        # Noted before the first point is sent: after a kill, any of the points may be there.
        return replace(self, reach=_larger(self.step, _final_step(lines)), sending=(lines[0].attempt, lines[0].offset))


def _final_step(lines: Iterable[Decided]) -> int | None:
    return max((line.step for line in lines if Fate.FINAL in line.parts), default=None)


def _larger(first: int | None, second: int | None) -> int | None:
    return max((step for step in (first, second) if step is not None), default=None)


class Attempted(NamedTuple):
    """An attempt: how it started, and its lines from a byte offset on, which can be read any number of times."""

    start: AttemptStart
    lines: Callable[[int], Iterable[LoggedLine]]


def covered_until(checkpoints: Iterable[Checkpoint]) -> Callable[[int, float], float]:
    """A function of a point's attempt and time that returns the first step whose points are not final yet.

    A checkpoint covers all points logged before it was saved. Points of its own step are left out, since ranks that
    resume from it may evaluate again at that step.

    Args:
        checkpoints: The run's checkpoints; only checkpoints that a later attempt can resume from count.
    """
    usable = [each for each in checkpoints if each.on_disk and each.complete]
    # Of a checkpoint that a script's own library has saved, the attempt may be unknown.
    of_attempts = _largest_after([((each.attempt, each.saved_at), each.step) for each in usable if each.attempt])
    other = _largest_after([((0, each.saved_at), each.step) for each in usable if not each.attempt])
    return lambda attempt, time: max(of_attempts((attempt, time)), other((0, time)))


def _largest_after(saved: Iterable[tuple[tuple[int, float], int | None]]) -> Callable[[tuple[int, float]], float]:
    """A function of an attempt and a time: the largest step that was saved there or later."""
    ordered = sorted((place, step) for place, step in saved if step)
    places = [place for place, _ in ordered]
    largest = [-minimum for minimum in _suffix_minimum([-step for _, step in ordered])]
    return lambda place: largest[bisect_left(places, place)]


def all_final(attempt: int, time: float) -> float:
    """As what :func:`covered_until` returns, for a run that has ended: no step is open."""
    del attempt, time
    return math.inf


class _Rollback(NamedTuple):
    """What was logged before byte ``offset`` of an attempt for ``step`` and later ones is superseded."""

    attempt: int
    offset: int
    step: int


class Settlement:
    """What became of the points that a tracker does not have yet. Finds the rollbacks among them when it is made."""

    def __init__(
        self, attempts: Sequence[Attempted], place: Place, open_from: Callable[[int, float], float] | None = None
    ) -> None:
        """Read the points once.

        Args:
            attempts: The run's, in order.
            place: How far the tracker has the run.
            open_from: By a surviving point's attempt and time, the smallest step that is still open; None: the newest
                step, since points may still be added to it.
        """
        self.place = place
        self.cut: int | None = None
        """The largest step such that all points before it at the tracker survive; None: all survive."""
        self.incomplete = False
        """Whether the surviving line has points, before the newest that the tracker has, that it was never given."""
        self._attempts = attempts
        self._open_from = open_from
        self._course = Course(place.step or 0)
        self._rollbacks: list[_Rollback] = []
        # By the place of a line, the metrics that were logged again for its step, which replaces them.
        self._overwritten: dict[tuple[int, int], set[str]] = {}
        for each in attempts:
            number = each.start.number
            if number >= place.attempt:
                self._walk(each)
                continue
            if place.offsets.get(number, 0):
                self._note_earlier(each.start)
            # Lines may come to light only when points of a later attempt have been sent already.
            later = (other.start.step for other in attempts if number < other.start.number <= place.attempt)
            bound = min(filter(None, later), default=math.inf)
            self.incomplete |= any(line.point.step <= bound for line in each.lines(place.offsets.get(number, 0)))
        # For bisection: what supersedes a line is the smallest step of all rollbacks behind it.
        self._places = [(rollback.attempt, rollback.offset) for rollback in self._rollbacks]
        self._smallest = _suffix_minimum([rollback.step for rollback in self._rollbacks])

    def batches(self, lines: int) -> Iterator[list[Decided]]:
        """The settled lines, in the order of logging, up to the first that is open.

        A batch has all lines of its last step, so that the step of a :class:`Place` says exactly which lines have been
        sent, and no rollback within, so that it is known too which lines of it may have been sent.

        Args:
            lines: At least so many in each batch that no rollback follows.
        """
        batch: list[Decided] = []
        behind = 0
        for each in self._lines():
            if Fate.OPEN in each.parts:
                break
            before, behind = behind, bisect_right(self._places, (each.attempt, each.offset))
            # A command may be killed within a batch: what the tracker then has is told by one step.
            if batch and (before != behind or (len(batch) >= lines and each.step != batch[-1].step)):
                yield batch
                batch = []
            batch.append(each)
        if batch:
            yield batch

    def undecided(self) -> Iterator[Decided]:
        """The open lines that survive so far, in the order of logging."""
        return (each for each in self._lines() if Fate.OPEN in each.parts)

    def _lines(self) -> Iterator[Decided]:
        for start, lines in self._attempts:
            for line in lines(self.place.offsets.get(start.number, 0)):
                parts = self._parts(start.number, line)
                yield Decided(start.number, line.offset, line.end, line.point.step, line.point.time, parts)

    def _parts(self, attempt: int, line: LoggedLine) -> dict[Fate, Point]:
        """The metrics of a line by what becomes of them."""
        point, place = line.point, (attempt, line.offset)
        if self._smallest[bisect_right(self._places, place)] <= point.step:
            return {Fate.REPLAYED: point}
        open_from = self._course.step if self._open_from is None else self._open_from(attempt, point.time)
        kept = Fate.OPEN if point.step >= open_from else Fate.FINAL
        # What is logged again for its own step replaces a value without a rollback: it is superseded in part.
        replaced = self._overwritten.get(place)
        if not replaced:
            return {kept: point}
        parts = {
            Fate.REPLAYED: {name: value for name, value in point.metrics.items() if name in replaced},
            kept: {name: value for name, value in point.metrics.items() if name not in replaced},
        }
        return {fate: point._replace(metrics=metrics) for fate, metrics in parts.items() if metrics}

    def _walk(self, attempt: Attempted) -> None:
        """Note the rollbacks at the start of an attempt, and among its lines."""
        (number, first_step, restarts), lines = attempt
        offset = end = self.place.offsets.get(number, 0)
        if not offset:
            self._resume(first_step, number, 0)
        else:
            self._note_earlier(attempt.start)
        # Restarts before the place have led there.
        left = [each for each in restarts if not offset or each.at > self.place.until]
        left = sorted(left, key=lambda restart: restart.at)[::-1]
        logged: dict[str, tuple[int, int]] = {}
        for line in lines(offset):
            step, end = line.point.step, line.end
            while left and line.point.time >= left[-1].at:
                self._resume(left.pop().step, number, line.offset)
            if step != self._course.step or self._course.resumed:
                logged = {}
            superseded = self._course.reach(step, step)
            if superseded is not None:
                self._note(superseded, number, line.offset)
            elif self.place.step is not None and step <= self.place.step and (self.cut is None or step <= self.cut):
                self.incomplete = True
            for name in line.point.metrics:
                if name in logged:
                    self._overwritten.setdefault(logged[name], set()).add(name)
                logged[name] = (number, line.offset)
        while left:
            self._resume(left.pop().step, number, end)

    def _resume(self, step: int | None, attempt: int, offset: int) -> None:
        """The ranks have resumed from this step, before the line at this place."""
        superseded = self._course.resume(step)
        if superseded is not None:
            self._note(superseded, attempt, offset)

    def _note(self, step: int, attempt: int, offset: int) -> None:
        """Before this place, the run was rolled back: what was logged for ``step`` and later ones is superseded."""
        self._rollbacks.append(_Rollback(attempt, offset, step))
        place = self.place
        # The lines of an interrupted batch are behind "sending": a rollback before that place spares them.
        reach = place.step if (attempt, offset) <= place.sending else place.reach
        if reach is not None and step <= reach:
            self.cut = min(step - 1, reach if self.cut is None else self.cut)

    def _note_earlier(self, start: AttemptStart) -> None:
        """Note the rollback at the start of an attempt whose points the tracker has: it concerns late lines only."""
        if start.step:
            self._rollbacks.append(_Rollback(start.number, 0, start.step + 1))


def start_over(settlement: Settlement, *, truncates: bool) -> Place:
    """From where a tracker is to be sent points, which may be behind the place where it is.

    The smaller ``step`` of such a place says what the tracker may keep; without any, it has to begin anew.

    Args:
        settlement: The points behind the place where it is.
        truncates: Whether it can drop all points after a step.
    """
    place, cut = settlement.place, settlement.cut
    # Points cannot be put in front of others, and some trackers cannot take any back.
    if settlement.incomplete or (cut is not None and not truncates):
        return Place()
    return place if cut is None or place.step is None else replace(place, step=min(cut, place.step))


def _suffix_minimum(steps: Sequence[int]) -> list[float]:
    """For each place the smallest of the ``steps`` from there on, and infinity behind the last."""
    smallest = [math.inf]
    for step in reversed(steps):
        smallest.append(min(smallest[-1], step))
    return smallest[::-1]
