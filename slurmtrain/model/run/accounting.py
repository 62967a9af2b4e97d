"""Where the time of an attempt went: each second has exactly one kind, and goodput is the share that was useful.

Pure arithmetic over the same events that the run is built from. An attempt in progress is counted up to the last event
known about it, never up to now, so that reading the journals again gives the same result.

Times are by the clock of node 0, which rank 0 shares. From other nodes only ``hang`` events are used, with their times
corrected by the clock offset that the preflight measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from slurmtrain.model.experiment.prices import mean_gpus
from slurmtrain.model.run.attempt_facts import AttemptFacts, SaveLog
from slurmtrain.model.run.events import agent_events, checkpoint_events, command_events, rank_events
from slurmtrain.model.run.events.base import AnyEvent, Event, select
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.layout import node_of
from slurmtrain.model.run.run import CAUSES, GROW, Attempt, Checkpoint, Run, replace

KINDS = ("queue", "start", "preflight", "restore", "train", "stall", "stop", "lost")
"""What a second of an attempt can be spent on; ``docs/goodput.md`` defines each kind."""

# Microseconds, the resolution of journals: integers, so that the kinds add up to the total exactly.
_TICKS = 1_000_000
_END_OF_TIME = 1e12
# Kinds of events that start another phase at their own time, whatever they contain. The others are in _phases().
_PHASE_AFTER = {
    "agent": "start", "waiting": "queue", "waiting_for_slot": "queue", "rendezvous": "start", "restart": "start",
    "total": "train", "stopping": "stop", "kept": "stop", "stopped": "stop", "raised": "stop", "requeue": "stop",
    "end": "stop",
}  # fmt: skip


@dataclass(slots=True)
class _Round:
    """One start of the ranks. ``begin``: the step that it starts from; ``trained_at``: when its first step began.

    ``captures``: the steps that were saved, and when; ``reached``: the last finished step; ``reached_at``: when it
    was finished, if known.
    """

    until: float
    has_session: bool = False
    begin: int | None = None
    trained_at: float | None = None
    captures: list[tuple[int, float]] = field(default_factory=list)
    reached: int | None = None
    reached_at: float | None = None

    def last_step(self) -> int:
        """The last step that is known to be finished."""
        steps = [step for step, _ in self.captures]
        return max(self.begin or 0, *steps, self.reached if self.reached is not None else 0)

    def moment_of(self, step: int) -> float:
        """When a step was finished, in seconds since 1970.

        This is known if the step was saved. Otherwise it is interpolated linearly between the nearest known steps
        before and after it.
        """
        assert self.trained_at is not None
        ends = [] if self.reached is None else [(self.reached, self.reached_at or self.until)]
        moments = sorted([(self.begin or 0, self.trained_at), *self.captures, *ends])
        for (before, began), (after, ended) in pairwise(moments):
            if before <= step < after:
                return began + (ended - began) * (step - before) / (after - before)
        return moments[0][1] if step < moments[0][0] else moments[-1][1]


class Interval(NamedTuple):
    """What an attempt spent a time on, without a break: from ``begin`` to ``end``, in seconds since 1970."""

    kind: str
    begin: float
    end: float


def accounted(
    attempts: Sequence[Attempt],
    facts: Mapping[str, AttemptFacts],
    progress: Mapping[str, Progress],
    checkpoints: Sequence[Checkpoint],
) -> list[Attempt]:
    """The attempts of a run, in order, with the steps each lost and where its time went.

    Lost steps were finished but have to be repeated: within the attempt, after its ranks were restarted in place, or
    after its end, by the next attempt. Until the next attempt starts to train, they are counted from the newest
    checkpoint.

    Args:
        attempts: The attempts, numbered.
        facts: What is known about each, by its key.
        progress: The progress of each according to its metrics, by its key.
        checkpoints: All checkpoints of the run.
    """
    accounts = _accounts(attempts, facts, progress, checkpoints)
    return [
        replace(attempt, spent=_spent(account.intervals()), lost_steps=account.lost_steps(attempt))
        for attempt, account in zip(attempts, accounts, strict=True)
    ]


def timelines(
    attempts: Sequence[Attempt],
    facts: Mapping[str, AttemptFacts],
    progress: Mapping[str, Progress],
    checkpoints: Sequence[Checkpoint],
) -> dict[str, list[Interval]]:
    """When each attempt spent its time on what, by its key: in order, without gaps; the sums are its ``spent``.

    The arguments ``attempts``, ``facts``, ``progress`` and ``checkpoints`` are as for :func:`accounted`.
    """
    accounts = _accounts(attempts, facts, progress, checkpoints)
    return {attempt.key: account.merged() for attempt, account in zip(attempts, accounts, strict=True)}


def _accounts(
    attempts: Sequence[Attempt],
    facts: Mapping[str, AttemptFacts],
    progress: Mapping[str, Progress],
    checkpoints: Sequence[Checkpoint],
) -> Iterator[_Account]:
    # The newest checkpoint on disk; the beginning if there is none.
    usable = [each for each in checkpoints if each.on_disk and each.complete]
    last = max(usable, key=lambda each: each.saved_at, default=None)
    newest = _Resumption(max((each.step for each in usable if each.step is not None), default=0))
    if last is not None and last.step is None:
        newest = _Resumption(None, last.saved_at)
    own = [facts.get(attempt.key, AttemptFacts()) for attempt in attempts]
    summaries = [
        _summary(own_facts, progress.get(attempt.key, Progress()), attempt.ended_at)
        for own_facts, attempt in zip(own, attempts, strict=True)
    ]
    begins = [next((each.begin for each in summary.rounds if each.begin is not None), None) for summary in summaries]
    before: Attempt | None = None
    for index, attempt in enumerate(attempts):
        following = next((step for step in begins[index + 1 :] if step is not None), None)
        resumed_at = None
        if attempt.ended and attempt.cause != "completed":
            resumed_at = newest if following is None else _Resumption(following)
        elif attempt.ended and following is not None and following < (attempt.last_step or 0):
            # Work after its last step, such as an evaluation, is lost only if a later attempt goes back.
            resumed_at = _Resumption(following)
        requeued_at = before.ended_at if before is not None and before.job_id == attempt.job_id else None
        begins_at = (requeued_at, attempt.submitted_at, attempt.started_at)
        queued_from = next((at for at in begins_at if at is not None), own[index].first)
        yield _Account(summaries[index], queued_from, resumed_at)
        before = attempt


@dataclass(frozen=True, slots=True)
class _Resumption:
    """What training resumes from: a ``step``, or else, if that is unknown, the state at a time (seconds since 1970)."""

    step: int | None
    saved_at: float = 0.0


def goodput(attempts: Iterable[Attempt]) -> float | None:
    """The share (0 to 1) of the time on nodes that went into training that was kept; None if it has had no nodes yet.

    Each attempt is weighted by its number of nodes (:func:`mean_nodes`).
    """
    kept = used = 0.0
    for attempt in attempts:
        nodes = mean_nodes(attempt)
        kept += nodes * attempt.spent.get("train", 0.0)
        used += nodes * sum(seconds for kind, seconds in attempt.spent.items() if kind != "queue")
    return kept / used if used > 0 else None


def mean_nodes(attempt: Attempt) -> float:
    """How many nodes an attempt had on average while it had any: some may have joined later, and have left again.

    One whose nodes are unknown counts as one node.
    """
    nodes = float(max(1, len(attempt.hosts)))
    used = sum(seconds for kind, seconds in attempt.spent.items() if kind != "queue")
    if used <= 0 or attempt.started_at is None:
        return nodes
    joined: set[int] = set()
    for restart in attempt.restarts:
        # The share of its time that was left when they joined; clocks may put that outside of the attempt.
        share = min(1.0, max(0.0, (float(restart["at"]) - attempt.started_at) / used))
        newcomers = set(restart.get("joined") or ())
        # Nodes of its own job are the job's until its end.
        nodes -= share * len(newcomers) + (1.0 - share) * len(joined & set(restart.get("lost") or ()))
        joined |= newcomers
    return max(1.0, nodes)


def summed(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Seconds by kind, summed over these attempts."""
    total = dict.fromkeys(KINDS, 0)
    for attempt in attempts:
        for kind, seconds in attempt.spent.items():
            total[kind] += _ticks(seconds)
    return {kind: ticks / _TICKS for kind, ticks in total.items()}


Ticks = tuple[str, int, int]


def _swept(
    begin: float, end: float, phases: Iterable[tuple[float, str]], covers: Iterable[tuple[str, float, float]]
) -> Iterator[Ticks]:
    """Each kind with its begin and end, in ticks, from ``begin`` to ``end``; anything outside is ignored.

    A phase lasts until the next one; of two at the same time, the last wins. Training time that an interval covers is
    of its kind: a stall outranks a loss. ``queue`` replaces any time.
    """
    phase, at, last = "queue", _ticks(begin), _ticks(end)
    covering = {"queue": 0, "stall": 0, "lost": 0}
    marks = [(_ticks(when), name, 0) for when, name in phases]
    for kind, since, until in covers:
        if until > since:
            marks += [(_ticks(since), kind, 1), (_ticks(until), kind, -1)]
    # The sort is stable: at the same moment a phase begins before anything covers it, and the last phase wins.
    for when, name, change in sorted(marks, key=lambda mark: mark[0]):
        stop = min(max(when, at), last)
        yield _kind(phase, covering), at, stop
        at = stop
        if change:
            covering[name] += change
        else:
            phase = name
    yield _kind(phase, covering), at, last


def _spent(intervals: Iterable[Ticks]) -> dict[str, float]:
    """Seconds by kind."""
    spent = dict.fromkeys(KINDS, 0)
    for kind, begin, end in intervals:
        spent[kind] += end - begin
    return {kind: ticks / _TICKS for kind, ticks in spent.items()}


def _kind(phase: str, covering: Mapping[str, int]) -> str:
    if covering["queue"] > 0 or phase != "train":
        return "queue" if covering["queue"] > 0 else phase
    return next((kind for kind in ("stall", "lost") if covering[kind] > 0), phase)


def _ticks(time: float) -> int:
    # A journal may hold any number, but no real time lies beyond these bounds.
    return round(max(-_END_OF_TIME, min(time, _END_OF_TIME)) * _TICKS)


# --- what the events say ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Summary:
    """One attempt: its events in order, its saves, its rounds, and the last time known about it."""

    events: Sequence[AnyEvent]
    saves: SaveLog
    rounds: Sequence[_Round]
    end: float


def _summary(facts: AttemptFacts, progress: Progress, ended_at: float | None) -> _Summary:
    events = _of_leader(facts.events)
    saves = facts.saves.with_saves(events)
    moments = [*(event.time for event in events), saves.last, progress.last_time]
    end = ended_at if ended_at is not None else max((time for time in moments if time is not None), default=0.0)
    return _Summary(events, saves, _rounds(events, saves, progress, end), end)


@dataclass(frozen=True, slots=True)
class _Account:
    """One attempt: since when it waited, and what training resumed from after it; None: nothing is repeated."""

    summary: _Summary
    queued_from: float
    resumed_at: _Resumption | None

    def intervals(self) -> Iterator[Ticks]:
        """What its time was spent on, in order; some intervals are empty."""
        summary = self.summary
        covers = [("stall", *stall) for stall in summary.saves.stalls]
        covers += [("lost", *interval) for interval in _thrown_away(summary.rounds, self.resumed_at)]
        for event in select(summary.events, agent_events.HangDetected):
            # No rank made progress until the hang was detected.
            idle = [float(rank["idle_s"]) for rank in event.payload.ranks if "idle_s" in rank]
            covers.append(("lost", event.time - min((each for each in idle if each > 0), default=0.0), event.time))
        covers += [
            ("queue", event.payload.since, event.time) for event in select(summary.events, agent_events.JobSuspended)
        ]
        return _swept(self.queued_from, max(self.queued_from, summary.end), _phases(summary), covers)

    def merged(self) -> list[Interval]:
        """The same in seconds, without empty ones, neighbours of a kind as one."""
        lasting = (each for each in self.intervals() if each[2] > each[1])
        parts = [list(group) for _, group in groupby(lasting, key=itemgetter(0))]
        return [Interval(part[0][0], part[0][1] / _TICKS, part[-1][2] / _TICKS) for part in parts]

    def lost_steps(self, attempt: Attempt) -> int | None:
        """How many steps have to be repeated; None if that is not known."""
        resumed_at = self.resumed_at
        if resumed_at is not None and resumed_at.step is None:
            return None
        return _repeated_steps(attempt, self.summary.rounds, resumed_at.step if resumed_at else None)


def _of_leader(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    """Drop the events of nodes and ranks other than 0, unless node 0 wrote none; hangs are put on node 0's clock."""
    if not any(node_of(event.source) == "0" for event in events):
        return list(events)
    # Clocks are compared with the clock of node 0.
    ahead = {
        node_of(event.source): event.payload.offset_ms or 0.0 for event in select(events, agent_events.ClockMeasured)
    }
    kept = []
    for event in events:
        node = node_of(event.source)
        if node in ("", "0"):
            is_raised = isinstance(event.payload, rank_events.ExceptionRaised)
            if not is_raised or event.source.rpartition("/")[2].startswith("rank-0."):
                kept.append(event)
        elif isinstance(event.payload, agent_events.HangDetected):
            at = event.time - ahead.get(node, 0.0) / 1000
            kept.append(Event(at, event.payload, event.source, event.offset))
    return sorted(kept, key=lambda event: event.order)


def _rounds(events: Sequence[AnyEvent], saves: SaveLog, progress: Progress, end: float) -> list[_Round]:
    """The rounds of an attempt in order; any of them may not have trained."""
    rounds = [_Round(until=end)]
    for event in events:
        newest, payload = rounds[-1], event.payload
        if isinstance(payload, agent_events.RanksRestarted):
            # Only node 0 journals restarts: its time ends the round.
            newest.until = event.time
            newest.reached = payload.reached if payload.reached is not None else newest.reached
            rounds.append(_Round(until=end))
        elif isinstance(payload, rank_events.SessionStarted):
            newest.has_session = True
            # A session begins at step 0 and is restored afterwards, so 0 does not say yet where it resumes.
            newest.begin = payload.step or newest.begin
        elif isinstance(payload, checkpoint_events.CheckpointRestored):
            newest.begin = payload.step
        elif isinstance(payload, rank_events.TrainingStarted) and newest.trained_at is None:
            newest.begin, newest.trained_at = newest.begin or 0, event.time
        elif isinstance(payload, rank_events.ScriptProgressed):
            if payload.step is not None and newest.trained_at is None:
                newest.begin, newest.trained_at = payload.step, event.time
            newest.reached = payload.last_step if payload.last_step is not None else newest.reached
    newest = rounds[-1]
    if progress.last_time is not None and newest.trained_at is not None and progress.last_time >= newest.trained_at:
        newest.reached, newest.reached_at = progress.last_step, progress.last_time
    # The step that a round resumes from was saved by an earlier one, whose own event about it may be missing.
    for step, at in saves.captures:
        for each in rounds:
            if each.trained_at is not None and each.trained_at <= at < each.until and step > (each.begin or 0):
                each.captures.append((step, at))
    return rounds


def _phases(summary: _Summary) -> Iterator[tuple[float, str]]:
    """Each phase and when it began. Before the first one, the attempt is in the queue."""
    begins = [event.payload.started_at or 0.0 for event in select(summary.events, command_events.JobObserved)]
    begun = [began for began in begins if began > 0]
    agents = [event.time for event in select(summary.events, agent_events.AgentStarted)]
    # Slurm rounds times to whole seconds, but no agent writes before its job begins.
    if begun or agents:
        yield min([*begun[-1:], *agents[:1]]), "start"
    for at in sorted(summary.saves.stops):
        yield at, "stop"
    number = 0
    for event in summary.events:
        payload = event.payload
        number += isinstance(payload, agent_events.RanksRestarted)
        if isinstance(payload, agent_events.PreflightDone):
            yield event.time - payload.seconds, "preflight"
            yield event.time, "start"
        elif isinstance(payload, agent_events.WorkersStarted):
            # A user script without a session does not journal when it begins to train.
            yield event.time, "start" if summary.rounds[number].has_session else "train"
        elif isinstance(payload, checkpoint_events.CheckpointRestored):
            yield event.time - payload.took_s, "restore"
            yield event.time, "start"
        elif isinstance(payload, agent_events.HangDetected):
            yield event.time, "stop"
        elif isinstance(payload, agent_events.NodeEnded) and payload.cause != "completed":
            yield min(event.time, payload.failed_at or event.time), "stop"
        if payload.kind in _PHASE_AFTER:
            yield event.time, _PHASE_AFTER[payload.kind]


def _thrown_away(rounds: Sequence[_Round], resumed_at: _Resumption | None) -> Iterator[tuple[float, float]]:
    """The intervals whose training is repeated. A later round may resume from before the start of an earlier one."""
    step = resumed_at.step if resumed_at is not None else None
    saved_at = resumed_at.saved_at if resumed_at is not None and step is None else None
    for each in reversed(rounds):
        if each.trained_at is None:
            continue
        if saved_at is not None:
            yield max(each.trained_at, saved_at), each.until
            step, saved_at = each.begin, None
            continue
        if step is None and each is not rounds[-1]:
            # The next round has not trained yet: it will resume from the newest checkpoint.
            step = max((saved for saved, _ in each.captures), default=each.begin)
        if step is not None:
            yield max(each.trained_at, each.moment_of(step)), each.until
        step = each.begin if step is None else min(step, each.begin or 0)


def _repeated_steps(attempt: Attempt, rounds: Sequence[_Round], resumed_at: int | None) -> int | None:
    """The number of steps that an attempt finished and that have to be repeated; None if not known yet."""
    trained = [each for each in rounds if each.trained_at is not None]
    in_place = sum(max(0, before.last_step() - (after.begin or 0)) for before, after in pairwise(trained))
    if not attempt.ended or attempt.last_step is None:
        return in_place or None
    if resumed_at is None:
        return in_place
    # The last line of the metrics may belong to an earlier round, if the last round has finished no step.
    last = trained[-1].last_step() if trained and len(rounds) > 1 else attempt.last_step
    return in_place + max(0, last - resumed_at)


ATTEMPTS, QUEUED, QUEUE_S, LOST_STEPS = "attempts", "queued", "queue_s", "lost_steps"
NODE_S, GPU_S = "node_s", "gpu_s"
# No event says it: whoever counts adds it from the files of nodes.
GPU_J = "gpu_j"
INTERRUPTED = "interrupted:"
"""Begins the name of a count of interruptions, whose end is the cause."""
UNPRODUCTIVE = ("start", "preflight", "restore", "stall", "stop", "lost")
"""Kinds of time on nodes that is neither queueing nor training that was kept."""
PLANNED = ("completed", "cancelled")
"""Causes for which attempts end as somebody meant them to; every other is an interruption."""


class Placement(NamedTuple):
    """Where attempts ran: ``executor`` is slurm or local, or empty; ``partition`` is empty where there is none."""

    executor: str
    partition: str


Tally = dict[Placement, dict[str, float]]
"""Sums by place, then by name: seconds where the name says so, else counts."""


def place_of(run: Run, attempt: Attempt | None) -> Placement:
    """Where an ``attempt`` of a ``run`` ran; without one, only what starts the run is known."""
    if attempt is None:
        return Placement(run.executor, "")
    return Placement(attempt.executor or run.executor, attempt.partition)


def tally(run: Run) -> Tally:
    """What a ``run`` adds to the sums."""
    result: Tally = {}
    for attempt in run.attempts:
        sums = result.setdefault(place_of(run, attempt), defaultdict(float))
        sums[ATTEMPTS] += 1
        sums[LOST_STEPS] += attempt.lost_steps or 0
        if attempt.started_at is not None:
            sums[QUEUED] += 1
            sums[QUEUE_S] += attempt.spent.get("queue", 0.0)
        causes = [str(restart.get("cause")) for restart in attempt.restarts if restart.get("cause") != GROW]
        if attempt.ended and attempt.cause is not None and attempt.cause not in PLANNED:
            causes.append(attempt.cause)
        for cause in causes:
            # A label's values must be few, whatever a journal holds.
            sums[INTERRUPTED + (cause if cause in CAUSES else "other")] += 1
        nodes = mean_nodes(attempt)
        seconds = {kind: nodes * spent for kind, spent in attempt.spent.items() if kind != "queue"}
        # The runs of a pack share a node, and perhaps its GPUs: what each takes adds up to no more than the job's.
        for name, weight in (
            (NODE_S, 1 / attempt.pack),
            (GPU_S, mean_gpus(attempt.resources) / (attempt.pack if attempt.share_gpu else 1)),
        ):
            if weight and any(seconds.values()):
                sums[name] += weight * sum(seconds.values())
                for kind in UNPRODUCTIVE:
                    sums[f"{name}:{kind}"] += weight * seconds.get(kind, 0.0)
    # Sums of 0 would make a label of each kind of time that no run has spent.
    return {place: {name: total for name, total in sums.items() if total} for place, sums in result.items()}


def merged(old: Tally, new: Tally) -> Tally:
    """The larger of both for each sum: of an ``old`` and a ``new`` tally of one run."""
    result = {place: dict(sums) for place, sums in old.items()}
    for place, sums in new.items():
        largest = result.setdefault(place, {})
        largest.update({name: max(total, largest.get(name, 0.0)) for name, total in sums.items()})
    return result
