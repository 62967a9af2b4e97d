"""Which lines of a run's metrics survive its rollbacks: the line of training that its newest weights have seen.

An attempt, or the ranks restarted inside of one, resume from a checkpoint and train the steps after it again. What was
logged for these steps before is superseded: it belongs to a training that led nowhere. What survives are segments of
rows; a rollback cuts segments off the end, and touches no row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slurmtrain.model.metrics.blocks import Block
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
    restarts = tuple(
        Restart(float(restart["at"]), attempt.round_step if index == last else None)
        for index, restart in enumerate(attempt.restarts)
    )
    return AttemptStart(attempt.number, attempt.first_step, restarts)


class Segment(NamedTuple):
    """The rows of a ``block`` from ``start`` up to ``stop``, logged by the ``attempt`` with this number."""

    attempt: int
    block: Block
    start: int
    stop: int


class Position(NamedTuple):
    """Where a line of training stands.

    ``step``: step of the newest row. ``resumed``: the ranks may have resumed from anywhere since. ``reached``: the
    largest step of all rows that survive; None if there are none.
    """

    step: int = 0
    resumed: bool = False
    reached: int | None = None


@dataclass(slots=True)
class Course:
    """Where the ranks are: at a ``step``; ``resumed``: they may have resumed from anywhere since they logged that.

    Both methods return the step from which on what was logged before is superseded; None if nothing is.
    """

    step: int = 0
    resumed: bool = False

    def resume(self, step: int | None) -> int | None:
        """The ranks have resumed from this step. 0 may also mean that they have not restored their checkpoint yet."""
        self.resumed = True
        if not step:
            return None
        self.step = step
        return step + 1

    def reach(self, first: int, last: int) -> int | None:
        """The next rows are of steps that never decrease, from ``first`` to ``last``."""
        # Several lines of one step, such as the line of an evaluation after it, are no rollback.
        goes_back = first < self.step or (self.resumed and first == self.step)
        self.step, self.resumed = last, False
        return first if goes_back else None


class SurvivingLine:
    """Finds the surviving rows of a run, attempt by attempt, in the order of logging.

    The steps of surviving rows never decrease. ``superseded`` has the rows that were rolled back, in the order of
    rollback.
    """

    def __init__(self, behind: Position = Position()) -> None:  # noqa: B008 - immutable
        """``behind``: goes on where rows that are not at hand any more have led; by default from the beginning."""
        self.kept: list[Segment] = []
        self.superseded: list[Segment] = []
        self.reaches_behind = False
        """Whether a rollback has also taken rows that are not at hand."""
        self._behind = behind.reached
        self._course = Course(behind.step, behind.resumed)

    @property
    def position(self) -> Position:
        """Where it stands now."""
        reached = self.kept[-1].block.steps[self.kept[-1].stop - 1] if self.kept else self._behind
        return Position(self._course.step, self._course.resumed, reached)

    def add_attempt(self, start: AttemptStart, blocks: Iterable[Block]) -> None:
        """Add the rows of the next attempt, which began at ``start``."""
        self.resume(start.step)
        restarts = sorted(start.restarts, key=lambda restart: restart.at)[::-1]
        for block in blocks:
            self._add_block(start.number, block, restarts)
        while restarts:
            self.resume(restarts.pop().step)

    def add_blocks(self, attempt: int, blocks: Iterable[Block]) -> None:
        """Add further rows of the newest attempt, whose number is ``attempt``, after all of its restarts."""
        for block in blocks:
            self._add_rows(attempt, block, 0, len(block))

    def resume(self, step: int | None) -> None:
        """The ranks have resumed from this step, as :meth:`Course.resume`."""
        self._roll_back(self._course.resume(step))

    def _add_block(self, attempt: int, block: Block, restarts: list[Restart]) -> None:
        """Add the rows of a ``block``; the ``restarts`` before each row, the earliest last, happen before it."""
        row = 0
        while restarts and row < len(block):
            at, times = restarts[-1].at, block.times
            first_after = next((i for i in range(row, len(block)) if times[i] >= at), None)
            if first_after is None:
                break
            self._add_rows(attempt, block, row, first_after)
            self.resume(restarts.pop().step)
            row = first_after
        self._add_rows(attempt, block, row, len(block))

    def _add_rows(self, attempt: int, block: Block, start: int, stop: int) -> None:
        """Add rows of a ``block``, at each descent of whose steps the run was rolled back."""
        descents = block.descents
        bounds = [*descents[bisect_left(descents, start + 1) : bisect_left(descents, stop)], stop]
        for bound in bounds:
            if start == bound:
                continue
            self._roll_back(self._course.reach(block.steps[start], block.steps[bound - 1]))
            self.kept.append(Segment(attempt, block, start, bound))
            start = bound

    def _roll_back(self, step: int | None) -> None:
        """Drop the rows of ``step`` and later steps; none for None."""
        if step is None:
            return
        dropped = []
        while self.kept:
            last = self.kept[-1]
            cut = bisect_left(last.block.steps, step, last.start, last.stop)
            if cut == last.stop:
                break
            self.kept.pop()
            dropped.append(last._replace(start=cut))
            if cut > last.start:
                self.kept.append(last._replace(stop=cut))
        self.superseded += reversed(dropped)
        self.reaches_behind |= self._behind is not None and self._behind >= step
