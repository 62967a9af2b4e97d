"""Which lines of a run's metrics survive its rollbacks, and their curves.

An attempt, or the ranks restarted inside of one, resume from a checkpoint and train the steps after it again. What was
logged for these steps before is superseded: it belongs to a training that led nowhere. What survives are segments of
rows: the line of training that the newest weights have seen. A rollback cuts segments off the end, and touches no row.
A curve has each step once, in increasing order, as if the run had never been interrupted.

A :class:`LineSummary` is what questions about many runs need, without their histories. It grows with the lines that are
appended. Where a rollback has taken away summarised lines, or the known facts about the attempts have changed, it is
made anew from all lines; both ways give the same.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import sub
from typing import Any, NamedTuple

from slurmtrain.model.metrics.columns import Block, MetricSummary, is_increasing
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
        # The earliest is last, where pop() takes it.
        restarts = sorted(start.restarts, key=lambda restart: restart.at)[::-1]
        for block in blocks:
            row = 0
            while restarts and row < len(block):
                at, times = restarts[-1].at, block.times
                first_after = next((i for i in range(row, len(block)) if times[i] >= at), None)
                # The restart is behind this block, or between it and the next one.
                if first_after is None:
                    break
                self._add_rows(start.number, block, row, first_after)
                self.resume(restarts.pop().step)
                row = first_after
            self._add_rows(start.number, block, row, len(block))
        # Nothing has been logged since these, but points after the step that they go back to are superseded already.
        while restarts:
            self.resume(restarts.pop().step)

    def add_blocks(self, attempt: int, blocks: Iterable[Block]) -> None:
        """Add further rows of the newest attempt, whose number is ``attempt``, after all of its restarts."""
        for block in blocks:
            self._add_rows(attempt, block, 0, len(block))

    def resume(self, step: int | None) -> None:
        """The ranks have resumed from this step, as :meth:`Course.resume`."""
        self._roll_back(self._course.resume(step))

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
            # Steps within a segment never decrease, so that the cut is found without walking its rows.
            cut = bisect_left(last.block.steps, step, last.start, last.stop)
            if cut == last.stop:
                break
            self.kept.pop()
            dropped.append(last._replace(start=cut))
            if cut > last.start:
                self.kept.append(last._replace(stop=cut))
        self.superseded += reversed(dropped)
        self.reaches_behind |= self._behind is not None and self._behind >= step


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
        # Whole arrays at once: a curve may have millions of points.
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


def curves_of(
    line: SurvivingLine, names: Collection[str] | None = None, *, keep_superseded: bool = False
) -> dict[str, Curve]:
    """The curves of all metrics that were logged, also if nothing of one survives.

    Args:
        line: The rows of the run.
        names: The metrics that matter; None: all.
        keep_superseded: Note superseded points too.
    """
    logged = dict.fromkeys(name for each in (*line.kept, *line.superseded) for name in each.block.columns)
    return {
        name: _curve(line, name, keep_superseded=keep_superseded) for name in logged if names is None or name in names
    }


def _curve(line: SurvivingLine, name: str, *, keep_superseded: bool) -> Curve:
    curve = Curve()
    superseded = curve.superseded if keep_superseded else None
    if superseded is not None:
        for segment in line.superseded:
            superseded.extend(segment.attempt, *columns_of_metric(segment, name))
    for segment in line.kept:
        steps, times, values = columns_of_metric(segment, name)
        if not len(steps):
            continue
        # Most segments can be appended whole, without looking at each of perhaps millions of points.
        is_next = not curve.kept.steps or curve.kept.steps[-1] < steps[0]
        if is_next and (segment.block.increases or is_increasing(steps)):
            curve.kept.extend(segment.attempt, steps, times, values)
        else:
            for point in zip(steps, times, values, strict=True):
                _replace(curve.kept, segment.attempt, *point, superseded)
    return curve


def columns_of_metric(segment: Segment, name: str) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
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


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a metric of two runs compares.

    ``steps``: the number of steps that both runs have. ``step``: the first of them where the values differ; None if
    they are equal at all. ``values``: the two values at that step.
    """

    steps: int
    step: int | None = None
    values: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"steps": self.steps, "step": self.step, "values": None if self.values is None else list(self.values)}


def find_divergence(first: Points, second: Points) -> Divergence:
    """Compare the values of a metric bit for bit, at the steps that both runs have; NaN equals NaN.

    Args:
        first: What one run has kept of it, in increasing steps.
        second: The same of the other one.
    """
    others = dict(zip(second.steps, second.values, strict=True))
    steps = [step for step in first.steps if step in others]
    for step, value in zip(first.steps, first.values, strict=True):
        other = others.get(step)
        # NaN is unequal to itself, though both runs have logged the same.
        if other is not None and value != other and not (math.isnan(value) and math.isnan(other)):
            return Divergence(len(steps), step, (value, other))
    return Divergence(len(steps))


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
    # Merged, not collected: the curves of all runs need not fit into memory twice.
    columns = ((points.steps, map(sub, points.times, repeat(since)), points.values) for points, since in curves)
    rows = heapq.merge(*(zip(*each, strict=False) for each in columns))
    for step, group in groupby(rows, key=lambda row: row[0]):
        at_step = list(group)
        time = math.fsum(time for _, time, _ in at_step) / len(at_step)
        values = [value for _, _, value in at_step if not math.isnan(value)] or [math.nan]
        # The mean of several runs belongs to no attempt: any number will do.
        result.means.append(1, step, time, sum(values) / len(values))
        result.lows.append(1, step, time, min(values))
        result.highs.append(1, step, time, max(values))
        result.counts.append(len(at_step))
    return result


class AttemptLines(NamedTuple):
    """Lines of an attempt, in the order of logging.

    ``key``: the name of its directory; ``blocks``: its lines from byte ``begin`` of its metrics up to ``end``.
    """

    key: str
    start: AttemptStart
    begin: int
    end: int
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class LineSummary:
    """The summaries of a run's metrics, and the ``attempts`` that they were made from, without their lines."""

    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    attempts: Sequence[AttemptLines] = ()
    position: Position = Position()

    def to_json(self) -> list[Any]:
        """What :meth:`from_json` needs besides ``metrics``."""
        # Without the metrics, which have a table of their own in the registry.
        return [list(self.position), [[each.key, each.end, *each.start] for each in self.attempts]]

    @classmethod
    def from_json(cls, data: Sequence[Any], metrics: Mapping[str, MetricSummary]) -> LineSummary:
        """The summary that :meth:`to_json` gave ``data`` of, with its ``metrics``."""
        position, attempts = data
        lines = [
            AttemptLines(key, AttemptStart(number, step, tuple(Restart(*each) for each in restarts)), end, end)
            for key, end, number, step, restarts in attempts
        ]
        return cls(metrics, lines, Position(*position))


def extend(summary: LineSummary, attempts: Sequence[AttemptLines]) -> LineSummary | None:
    """A summary with further lines.

    Args:
        summary: The summary so far.
        attempts: All attempts of the run, in order, with the lines that are new.

    Returns:
        The summary; None if it has to be made anew, from an empty one and all lines.
    """
    attempts = list(attempts)
    # An attempt that is only in the queue would keep its summary from being continued once it logs.
    while attempts and not (attempts[-1].end or attempts[-1].start.step or attempts[-1].start.restarts):
        attempts.pop()
    if not _is_continued(summary.attempts, attempts):
        return None
    line, count = SurvivingLine(summary.position), len(summary.attempts)
    # Of the known attempts only the newest has new lines, as _is_continued() has made sure.
    for newest in attempts[:count][-1:]:
        line.add_blocks(newest.start.number, newest.blocks)
    for each in attempts[count:]:
        line.add_attempt(each.start, each.blocks)
    metrics = None if line.reaches_behind else _with_segments(summary.metrics, line.kept)
    if metrics is None:
        return None
    read = [each._replace(begin=each.end, blocks=()) for each in attempts]
    return LineSummary(metrics, read, line.position)


def _is_continued(before: Sequence[AttemptLines], attempts: Sequence[AttemptLines]) -> bool:
    """Whether, of the attempts ``before``, at most the newest has grown, and all others are new."""
    earlier, added = attempts[: len(before)], attempts[len(before) :]
    if any(each.begin for each in added):
        return False
    if [(each.key, each.start, each.end) for each in before] != [
        (each.key, each.start, each.begin) for each in earlier
    ]:
        return False
    if any(each.begin != each.end for each in earlier[:-1]):
        return False
    for newest in earlier[-1:]:
        # Its restarts have been added behind all lines so far: a line from before one of them comes too late.
        restarted = max((restart.at for restart in newest.start.restarts), default=-math.inf)
        if newest.start.restarts and any(time < restarted for block in newest.blocks for time in block.times):
            return False
    return True


def _with_segments(
    metrics: Mapping[str, MetricSummary], segments: Iterable[Segment]
) -> Mapping[str, MetricSummary] | None:
    """Summaries with further ``segments``; None if a value that ``metrics`` summarise is logged again for its step."""
    summaries = dict(metrics)
    # The newest points of each metric; another point of the same step replaces the last of them.
    newest: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for segment in segments:
        for name in segment.block.columns:
            steps, _, values = columns_of_metric(segment, name)
            if not len(steps):
                continue
            if not (segment.block.increases or is_increasing(steps)):
                # The last value of each step counts.
                last_values = dict(zip(steps, values, strict=True))
                steps, values = list(last_values), list(last_values.values())
            # The last point of the segment before is only added now: a point of the same step would have replaced it.
            if name in newest:
                before, earlier = newest[name]
                count = len(before) - (before[-1] == steps[0])
                _add_to_summary(summaries, name, before[:count], earlier[:count])
            # The value to be replaced is one of those that were summarised: it cannot be taken out again.
            elif name in summaries and summaries[name].last_step == steps[0]:
                return None
            newest[name] = (steps, values)
    for name, points in newest.items():
        _add_to_summary(summaries, name, *points)
    return summaries


def _add_to_summary(
    summaries: dict[str, MetricSummary], name: str, steps: Sequence[int], values: Sequence[float]
) -> None:
    """Add points of the metric ``name`` to its summary, at increasing ``steps``."""
    if not len(steps):
        return
    at, finite, last = steps, values, None if math.isnan(values[-1]) else values[-1]
    # A sum shows whether all are finite, faster than looking at each; if it overflows, each is looked at.
    if not math.isfinite(sum(values)):
        places = [place for place, value in enumerate(values) if math.isfinite(value)]
        at, finite = [steps[place] for place in places], [values[place] for place in places]
    later = MetricSummary(len(values), steps[-1], last)
    if len(finite):
        low, high = min(finite), max(finite)
        low_at, high_at = at[finite.index(low)], at[finite.index(high)]
        later = MetricSummary(len(values), steps[-1], last, low, low_at, high, high_at)
    summaries[name] = summaries[name].then(later) if name in summaries else later
