"""Where the time of an attempt went: each second of it is of one kind, and goodput is the share that was of use.

Pure arithmetic over the same events that the run is folded from. An attempt that is under way is counted up to the last
fact that is known of it, never up to now, so that reading the journals again gives the same.

Times are those of node 0 and of rank 0, which share a clock; of another node only a ``hang`` is taken, its time set
right by what the preflight measured of that node's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import node_of
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Attempt, Checkpoint

KINDS = ("queue", "start", "preflight", "restore", "train", "stall", "stop", "lost")
"""What a second of an attempt is spent on; ``docs/goodput.md`` says what each one is."""

# Microseconds, which journals are rounded to: whole numbers, so that the kinds add up to the whole exactly.
_TICKS = 1_000_000
# Facts after which an attempt is in another phase from their own time on. Others need a look at what they say.
_PHASE_AFTER = {
    "agent": "start", "waiting": "queue", "rendezvous": "start", "restart": "start", "total": "train",
    "stopping": "stop", "stopped": "stop", "raised": "stop", "requeue": "stop", "end": "stop",
}  # fmt: skip


@dataclass(slots=True)
class _Round:
    """One start of the ranks. ``begin``: the step that it goes on from; ``trained_at``: when its first step began.

    ``captures`` are the steps that were saved, and when; ``reached`` is the last one that was finished, and
    ``reached_at`` when that was, as far as is known.
    """

    until: float
    has_session: bool = False
    begin: int | None = None
    trained_at: float | None = None
    captures: list[tuple[int, float]] = field(default_factory=list)
    reached: int | None = None
    reached_at: float | None = None

    def last_step(self) -> int:
        """The last step that it is known to have finished."""
        steps = [step for step, _ in self.captures]
        return max(self.begin or 0, *steps, self.reached if self.reached is not None else 0)

    def moment_of(self, step: int) -> float:
        """When a step was finished: known where it was saved, and else estimated from the nearest steps before and
        after it, as if all steps between them took the same time.
        """
        assert self.trained_at is not None
        ends = [] if self.reached is None else [(self.reached, self.reached_at or self.until)]
        known = sorted([(self.begin or 0, self.trained_at), *self.captures, *ends])
        for (before, began), (after, ended) in pairwise(known):
            if before <= step < after:
                return began + (ended - began) * (step - before) / (after - before)
        return known[0][1] if step < known[0][0] else known[-1][1]


def account(
    events: Iterable[AnyEvent],
    progress: Progress,
    *,
    queued_from: float,
    ended_at: float | None,
    goes_on_from: int | None,
) -> dict[str, float]:
    """Seconds by kind of one attempt, from ``queued_from`` to its end; in whole microseconds they add up to just that.

    ``events`` are the attempt's own and what commands observed of it, in any order. ``queued_from``: when it was
    submitted, or when the earlier start of the same job ended. ``ended_at`` is None for one under way.
    ``goes_on_from``: the step that training goes on from after it; None where nothing of it is, or will be, done again
    as far as is known.
    """
    return _seconds(_told(events, progress, ended_at), queued_from, goes_on_from)


def accounted(
    attempts: Sequence[Attempt],
    groups: Mapping[str, Sequence[AnyEvent]],
    progress: Mapping[str, Progress],
    checkpoints: Sequence[Checkpoint],
) -> list[Attempt]:
    """The attempts of a run, in their order, with what each lost and where its time went.

    ``groups`` and ``progress`` are by the attempt's key. Lost steps are those that were finished and are done again:
    within the attempt, where its ranks started again in place, and after its end by the next attempt. Until a next one
    has begun to train, that is counted from the newest checkpoint.
    """
    newest = max((c.step for c in checkpoints if c.on_disk and c.complete and c.step is not None), default=0)
    told = [_told(groups.get(a.key, ()), progress.get(a.key, Progress()), a.ended_at) for a in attempts]
    begins = [next((one.begin for one in each.rounds if one.begin is not None), None) for each in told]
    result: list[Attempt] = []
    for index, attempt in enumerate(attempts):
        goes_on_from = None
        if attempt.ended and attempt.cause != "completed":
            goes_on_from = next((step for step in begins[index + 1 :] if step is not None), newest)
        before = result[-1] if result and result[-1].job_id == attempt.job_id else None
        spent = _seconds(told[index], _queued_from(attempt, before, groups.get(attempt.key, ())), goes_on_from)
        lost_steps = _lost_steps(attempt, told[index].rounds, goes_on_from)
        result.append(replace(attempt, spent=spent, lost_steps=lost_steps))
    return result


def goodput(attempts: Iterable[Attempt]) -> float | None:
    """The share (0 to 1) of the time on nodes in which a run trained what it kept; None while it was on none.

    Each attempt counts with its number of nodes; one of which no node has spoken counts as one node.
    """
    kept = used = 0.0
    for attempt in attempts:
        nodes = max(1, len(attempt.hosts))
        kept += nodes * attempt.spent.get("train", 0.0)
        used += nodes * sum(seconds for kind, seconds in attempt.spent.items() if kind != "queue")
    return kept / used if used > 0 else None


def summed(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Seconds by kind of all these attempts together."""
    total = dict.fromkeys(KINDS, 0)
    for attempt in attempts:
        for kind, seconds in attempt.spent.items():
            total[kind] += _ticks(seconds)
    return {kind: ticks / _TICKS for kind, ticks in total.items()}


class _Sweep:
    """Goes through the time of an attempt once. Phases follow each other; what covers them changes training alone."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = _ticks(begin), _ticks(end)
        self._phases: list[tuple[int, str]] = []
        self._changes: list[tuple[int, str, int]] = []

    def begins(self, at: float, phase: str) -> None:
        """From then on it is in this phase, until the next one begins; of two at once, the one said last."""
        self._phases.append((_ticks(at), phase))

    def covers(self, kind: str, since: float, until: float) -> None:
        """In between, what would be training is of this kind; a stall is one even if what was trained is lost."""
        if until > since:
            self._changes += [(_ticks(since), kind, 1), (_ticks(until), kind, -1)]

    def seconds(self) -> dict[str, float]:
        """By kind, from the begin to the end, whatever lies outside."""
        spent = dict.fromkeys(KINDS, 0)
        phase, at = "queue", self._begin
        covering = {"stall": 0, "lost": 0}
        marks: list[tuple[int, str, int]] = [(when, name, 0) for when, name in self._phases]
        for when, name, change in sorted([*marks, *self._changes], key=lambda mark: mark[0]):
            until = min(max(when, at), self._end)
            spent[_kind(phase, covering)] += until - at
            at = until
            if change:
                covering[name] += change
            else:
                phase = name
        spent[_kind(phase, covering)] += self._end - at
        return {kind: ticks / _TICKS for kind, ticks in spent.items()}


def _kind(phase: str, covering: Mapping[str, int]) -> str:
    if phase != "train":
        return phase
    return next((kind for kind in ("stall", "lost") if covering[kind] > 0), phase)


def _ticks(time: float) -> int:
    return round(time * _TICKS)


# --- what the events say ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of one attempt, in order, and the time up to which it is."""

    facts: Sequence[AnyEvent]
    rounds: Sequence[_Round]
    end: float


def _told(events: Iterable[AnyEvent], progress: Progress, ended_at: float | None) -> _Told:
    facts = _of_leader(sorted(events, key=lambda event: event.order))
    end = ended_at if ended_at is not None else _last_known(facts, progress)
    return _Told(facts, _rounds(facts, progress, end), end)


def _seconds(told: _Told, queued_from: float, goes_on_from: int | None) -> dict[str, float]:
    sweep = _Sweep(queued_from, max(queued_from, told.end))
    for at, phase in _phases(told.facts, told.rounds):
        sweep.begins(at, phase)
    for since, until in _stalls(told.facts):
        sweep.covers("stall", since, until)
    for since, until in [*_thrown_away(told.rounds, goes_on_from), *_hung(told.facts)]:
        sweep.covers("lost", since, until)
    return sweep.seconds()


def _of_leader(facts: Sequence[AnyEvent]) -> list[AnyEvent]:
    """Without what other nodes and ranks say, unless nothing is known of node 0. A hang is told in node 0's time."""
    if not any(node_of(event.source) == "0" for event in facts):
        return list(facts)
    ahead = {node_of(e.source): _number(e.data, "offset_ms") / 1000 for e in facts if e.kind == "clock"}
    kept = []
    for event in facts:
        node = node_of(event.source)
        if node in ("", "0"):
            if event.kind != "raised" or event.source.rpartition("/")[2].startswith("rank-0."):
                kept.append(event)
        elif event.kind == "hang":
            kept.append(replace(event, time=event.time - ahead.get(node, 0.0)))
    return sorted(kept, key=lambda event: event.order)


def _rounds(facts: Sequence[AnyEvent], progress: Progress, end: float) -> list[_Round]:
    """The rounds of an attempt, the first one first, which may not have trained."""
    rounds = [_Round(until=end)]
    for event in facts:
        newest = rounds[-1]
        if event.kind == "restart":
            newest.until, newest.reached = event.time, _step(event.data, "reached")
            rounds.append(_Round(until=end))
        elif event.kind == "session":
            newest.has_session = True
            # A script's session begins at step 0 and is then restored: what it goes on from is not known yet.
            newest.begin = _step(event.data) or newest.begin
        elif event.kind == "restored":
            newest.begin = _step(event.data)
        elif event.kind == "total" and newest.trained_at is None:
            newest.begin, newest.trained_at = newest.begin or 0, event.time
    newest = rounds[-1]
    if progress.last_time is not None and newest.trained_at is not None and progress.last_time >= newest.trained_at:
        newest.reached, newest.reached_at = progress.last_step, progress.last_time
    for event in facts:
        step = _step(event.data)
        # What a round goes on from was saved by one before it, whose own word of that may be missing.
        if event.kind in ("saved", "restored") and step is not None:
            at = _captured_at(event)
            for one in rounds:
                if one.trained_at is not None and one.trained_at <= at < one.until and step > (one.begin or 0):
                    one.captures.append((step, at))
    return rounds


def _phases(facts: Sequence[AnyEvent], rounds: Sequence[_Round]) -> Iterator[tuple[float, str]]:
    """When which phase began. Before the first one, the attempt is in the queue."""
    begun = [float(event.data["started_at"]) for event in facts if event.kind == "observed" and _has_begun(event)]
    agents = [event.time for event in facts if event.kind == "agent"]
    # Slurm's times are whole seconds, but no agent speaks before its job begins.
    if begun or agents:
        yield min([*begun[-1:], *agents[:1]]), "start"
    number = 0
    for event in facts:
        number += event.kind == "restart"
        yield from _phases_of(event, rounds[number])


def _phases_of(event: AnyEvent, of: _Round) -> Iterator[tuple[float, str]]:
    if event.kind == "preflight":
        yield event.time - _number(event.data, "seconds"), "preflight"
        yield event.time, "start"
    elif event.kind == "workers":
        # Nobody tells when a script of the user's own begins to train.
        yield event.time, "start" if of.has_session else "train"
    elif event.kind == "restored":
        yield event.time - _number(event.data, "took_s"), "restore"
        yield event.time, "start"
    elif event.kind == "saved" and event.data.get("why") == "stop":
        yield _captured_at(event), "stop"
    elif event.kind == "hang":
        yield event.time, "stop"
    elif event.kind == "end" and event.data.get("cause") != "completed":
        yield min(event.time, _number(event.data, "failed_at") or event.time), "stop"
    if event.kind in _PHASE_AFTER:
        yield event.time, _PHASE_AFTER[event.kind]


def _stalls(facts: Sequence[AnyEvent]) -> Iterator[tuple[float, float]]:
    """When training stood still for a save: for the last one of all, until that was published."""
    for event in facts:
        if event.kind in ("saved", "save_failed") and event.data.get("why") != "stop":
            since = _captured_at(event)
            took = "seconds" if event.data.get("why") == "end" else "stall_s"
            yield since, since + _number(event.data, took)


def _thrown_away(rounds: Sequence[_Round], goes_on_from: int | None) -> Iterator[tuple[float, float]]:
    """When what was trained is, or will be, done again. A later round may go back behind where one before it began."""
    step = goes_on_from
    for one in reversed(rounds):
        if one.trained_at is None:
            continue
        if step is None and one is not rounds[-1]:
            # The next round has not come to train: it goes on from the newest checkpoint.
            step = max((saved for saved, _ in one.captures), default=one.begin)
        if step is not None:
            yield max(one.trained_at, one.moment_of(step)), one.until
        step = one.begin if step is None else min(step, one.begin or 0)


def _hung(facts: Sequence[AnyEvent]) -> Iterator[tuple[float, float]]:
    """When no rank finished anything any more, before that was called a hang."""
    for event in facts:
        if event.kind == "hang":
            idle = [_number(rank, "idle_s") for rank in event.data.get("ranks", ())]
            yield event.time - min((seconds for seconds in idle if seconds > 0), default=0.0), event.time


def _lost_steps(attempt: Attempt, rounds: Sequence[_Round], goes_on_from: int | None) -> int | None:
    """The steps that an attempt finished and that are done again; None where nothing is known of that yet."""
    trained = [one for one in rounds if one.trained_at is not None]
    in_place = sum(max(0, one.last_step() - (after.begin or 0)) for one, after in pairwise(trained))
    if not attempt.ended or attempt.last_step is None:
        return in_place or None
    if goes_on_from is None:
        return in_place
    # What metrics told last may be of a round before one that has finished no step.
    last = trained[-1].last_step() if trained and len(rounds) > 1 else attempt.last_step
    return in_place + max(0, last - goes_on_from)


def _queued_from(attempt: Attempt, before: Attempt | None, facts: Sequence[AnyEvent]) -> float:
    known = (before.ended_at if before else None, attempt.submitted_at, attempt.started_at)
    first = min((event.time for event in facts), default=0.0)
    return next((at for at in known if at is not None), first)


def _last_known(facts: Sequence[AnyEvent], progress: Progress) -> float:
    times = [event.time for event in facts]
    return max([*times, *([] if progress.last_time is None else [progress.last_time])], default=0.0)


def _captured_at(event: AnyEvent) -> float:
    """When the state was taken that a save wrote: the save began then, and said so when it was over."""
    data = event.data
    if "seconds" not in data:
        return event.time - _number(data, "stall_s")
    return (_number(data, "saved_at") or event.time) - _number(data, "seconds")


def _has_begun(event: AnyEvent) -> bool:
    return _number(event.data, "started_at") > 0


def _number(data: Mapping[str, Any], name: str) -> float:
    """A number of an event; 0 where it has none."""
    value = data.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else 0.0


def _step(data: Mapping[str, Any], name: str = "step") -> int | None:
    value = data.get(name)
    return value if isinstance(value, int) else None
