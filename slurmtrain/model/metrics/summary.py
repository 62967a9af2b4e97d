"""A summary of each metric's surviving line: what questions about many runs need, without their histories.

It grows with the lines that are appended. Where a rollback has taken away summarised lines, or the known facts about
the attempts have changed, it cannot be continued, and is made anew from all lines; both ways give the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slurmtrain.model.metrics.columns import Block, is_increasing
from slurmtrain.model.metrics.curves import AttemptStart, Position, Restart, Segment, SurvivingLine, columns_of


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """What survives of a metric: how many points, the newest one, and the smallest and largest finite values.

    Of equal values, the earliest counts. ``last`` may be infinite; None: it is not a number.
    """

    points: int
    last_step: int
    last: float | None
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None

    def then(self, later: MetricSummary) -> MetricSummary:
        """The summary of these points and ``later`` ones."""
        low = self if _is_first(self.min, later.min, smaller=True) else later
        high = self if _is_first(self.max, later.max, smaller=False) else later
        return MetricSummary(
            self.points + later.points, later.last_step, later.last, low.min, low.min_step, high.max, high.max_step
        )


def _is_first(earlier: float | None, later: float | None, *, smaller: bool) -> bool:
    if earlier is None or later is None:
        return later is None
    return earlier <= later if smaller else earlier >= later


class AttemptLines(NamedTuple):
    """Lines of an attempt, in the order of logging.

    ``key``: the name of its directory; ``blocks``: its lines from byte ``begin`` of its metrics up to ``end``.
    """

    key: str
    start: AttemptStart
    begin: int
    end: int
    blocks: Sequence[Block] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether it has neither lines nor a known step that it resumed from, so that it can be left out for now."""
        return not self.end and not self.start.step and not self.start.restarts


@dataclass(frozen=True, slots=True)
class LineSummary:
    """The summaries of a run's metrics, and the ``attempts`` that they were made from, without their lines."""

    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    attempts: Sequence[AttemptLines] = ()
    position: Position = Position()

    def to_json(self) -> list[Any]:
        """What :meth:`from_json` needs besides ``metrics``."""
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
    while attempts and attempts[-1].changes_nothing:
        attempts.pop()
    if not _is_continued(summary.attempts, attempts):
        return None
    line, count = SurvivingLine(summary.position), len(summary.attempts)
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
            steps, _, values = columns_of(segment, name)
            if not len(steps):
                continue
            if not (segment.block.increases or is_increasing(steps)):
                steps, values = _last_of_each(steps, values)
            if name in newest:
                before, earlier = newest[name]
                count = len(before) - (before[-1] == steps[0])
                _append(summaries, name, before[:count], earlier[:count])
            elif name in summaries and summaries[name].last_step == steps[0]:
                return None
            newest[name] = (steps, values)
    for name, points in newest.items():
        _append(summaries, name, *points)
    return summaries


def _append(summaries: dict[str, MetricSummary], name: str, steps: Sequence[int], values: Sequence[float]) -> None:
    """Add points of the metric ``name`` to its summary, at increasing ``steps``."""
    if not len(steps):
        return
    later = _summarise(steps, values)
    summaries[name] = summaries[name].then(later) if name in summaries else later


def _last_of_each(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The last value of each step."""
    newest = dict(zip(steps, values, strict=True))
    return list(newest), list(newest.values())


def _summarise(steps: Sequence[int], values: Sequence[float]) -> MetricSummary:
    """The summary of values at increasing steps; there is at least one value."""
    at, finite, last = steps, values, None if math.isnan(values[-1]) else values[-1]
    # A sum shows whether all are finite, faster than looking at each; if it overflows, each is looked at.
    if not math.isfinite(sum(values)):
        places = [place for place, value in enumerate(values) if math.isfinite(value)]
        at, finite = [steps[place] for place in places], [values[place] for place in places]
    if not len(finite):
        return MetricSummary(len(values), steps[-1], last)
    low, high = min(finite), max(finite)
    low_at, high_at = at[finite.index(low)], at[finite.index(high)]
    return MetricSummary(len(values), steps[-1], last, low, low_at, high, high_at)
