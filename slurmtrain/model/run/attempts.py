"""Builds an attempt from its events, one kind at a time; :mod:`.outcome` determines how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any

from slurmtrain.model.run.attempt_facts import AttemptFacts, SaveLog
from slurmtrain.model.run.attempt_progress import Progress
from slurmtrain.model.run.events.agent_events import (
    AgentStarted,
    ClockMeasured,
    CommandCompleted,
    HangDetected,
    HangLimitRaised,
    JobRequeue,
    NetworkElected,
    NodeEnded,
    NodesJoined,
    NodesKept,
    NodesRequested,
    PreflightDone,
    RanksApart,
    RanksPaused,
    RanksRestarted,
    RanksResumed,
    RendezvousReady,
    RequeueFailed,
    StragglerDetected,
    SurplusStart,
    WaitingForRun,
    WaitingForSlot,
    WorkersStarted,
)
from slurmtrain.model.run.events.base import AnyEvent, Payload, select
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound, CheckpointPassedOver, CheckpointRestored
from slurmtrain.model.run.events.command_events import (
    JobObserved,
    JobReplaced,
    Submitted,
    Submitting,
    Unstarted,
    UpstreamFailed,
)
from slurmtrain.model.run.events.rank_events import (
    HardwareCompared,
    ScriptProgressed,
    ScriptUnread,
    SessionStarted,
    SharesChosen,
)
from slurmtrain.model.run.job_state import ABSENT, is_final
from slurmtrain.model.run.layout import attempt_key, attempt_of, node_of, split_attempt
from slurmtrain.model.run.outcome import begin, superseded, with_outcome
from slurmtrain.model.run.run import APART, Attempt, replace

# Events of commands about one start of a job.
_OF_A_START = JobObserved | JobRequeue | RequeueFailed | JobReplaced | UpstreamFailed
# What the attempt keeps of a clock and of a finding; the evidence stays in the journal.
_CLOCK = ("offset_ms", "bound_ms", "disciplined", "source")
_FINDING = ("check", "status", "summary")


def group_by_attempt(events: Sequence[AnyEvent], saves: Mapping[str, SaveLog]) -> dict[str, AttemptFacts]:
    """Group ``events`` (in order) and ``saves`` by attempt: by the journal's directory, or as a command's event says.

    Events about a submission belong to every start of its job, or to an attempt without a job while none is known.
    """
    groups: dict[str, AttemptFacts] = {key: AttemptFacts(saves=log) for key, log in saves.items()}
    submissions: dict[int, list[AnyEvent]] = {}
    for event in events:
        payload = event.payload
        if folder := attempt_of(event.source):
            groups.setdefault(folder, AttemptFacts()).events.append(event)
        elif isinstance(payload, Submitting | Submitted | Unstarted):
            submissions.setdefault(payload.submission, []).append(event)
        elif isinstance(payload, _OF_A_START) and payload.job_id is not None:
            key = attempt_key(payload.job_id, payload.restart or 0)
            groups.setdefault(key, AttemptFacts()).events.append(event)
    # If nothing else says which attempt came first, their first events decide.
    groups = dict(sorted(groups.items(), key=lambda item: (item[1].first, item[0])))
    for number, about in submissions.items():
        jobs = {job for event in about if (job := _job_id(event.payload))}
        jobs |= {key.rpartition(".")[0] for key, facts in groups.items() if _submission(facts.events) == number}
        keys = [key for key in groups if key.rpartition(".")[0] in jobs] or [attempt_key(job, 0) for job in jobs]
        for key in keys or [f"{number}?"]:
            facts = groups.setdefault(key, AttemptFacts())
            facts.events = sorted([*facts.events, *about], key=lambda event: event.order)
    return groups


def _job_id(payload: Payload) -> str | None:
    return payload.job_id if isinstance(payload, Submitting | Submitted | Unstarted) else None


def _submission(events: Iterable[AnyEvent]) -> int | None:
    """The submission that an attempt's own agents name."""
    agents = (event.payload for event in select(events, AgentStarted))
    return next((agent.submission for agent in agents if agent.submission is not None), None)


def never_started(facts: AttemptFacts) -> bool:
    """Whether this attempt never began: its submission failed, its job was replaced, or the run was already over."""
    if select(facts.events, AgentStarted):
        return False
    return any(isinstance(event.payload, Unstarted | JobReplaced | SurplusStart) for event in facts.events)


def read_attempt(key: str, facts: AttemptFacts, progress: Progress, cancels: Sequence[float]) -> Attempt:
    """One attempt from its own facts, not numbered yet.

    Args:
        key: The name of its directory.
        facts: What is known about it.
        progress: Its progress according to its metrics.
        cancels: When a person cancelled the run, in seconds since 1970.
    """
    job_id, restart = split_attempt(key) or ("", 0)
    hosts = {str(event.payload.node): event.payload.host for event in select(facts.events, AgentStarted)}
    attempt = Attempt(
        number=0,
        job_id=job_id,
        restart=restart,
        state="requeued" if restart else "pending",
        hosts=hosts,
        save_problem=facts.saves.problem,
        interval=facts.saves.interval,
    )
    for event in facts.events:
        attempt = _apply(event.payload, attempt, event)
    if progress.last_step is not None:
        attempt = replace(attempt, last_step=progress.last_step)
    return with_outcome(attempt, facts.events, cancels)


def number_attempts(attempts: Mapping[str, Attempt], facts: Mapping[str, AttemptFacts]) -> list[Attempt]:
    """The attempts in the order they were started, numbered from 1.

    Only the last start of a job can be in progress; earlier ones are closed. Nodes that one start of a job excluded
    stay excluded for all later ones. ``attempts`` and ``facts`` are by the attempt's key.
    """
    last = {attempt.job_id: attempt.restart for attempt in sorted(attempts.values(), key=lambda a: a.restart)}
    closed = [
        superseded(attempt, facts[key]) if attempt.restart < last[attempt.job_id] else attempt
        for key, attempt in attempts.items()
    ]
    ordered = sorted(closed, key=lambda a: (a.submission, begin(a), a.restart, a.number))
    numbered = []
    excluded: dict[str, tuple[str, ...]] = {}
    for index, attempt in enumerate(ordered, 1):
        before = excluded.get(attempt.job_id, ())
        excluded[attempt.job_id] = (*before, *attempt.excluded)
        # Only the newest attempt decides who starts the run again.
        by = attempt.restarted_by if index == len(ordered) else None
        without = tuple(dict.fromkeys((*attempt.without, *before)))
        numbered.append(replace(attempt, number=index, restarted_by=by, without=without))
    return numbered


# --- one kind of event each -------------------------------------------------------------------------------------------


# What ranks do from then on, as long as the attempt runs.
_ACTIVITY: Mapping[type[Payload], Callable[[Any], str]] = {
    RanksRestarted: lambda _: "",
    NodesJoined: lambda _: "",
    RanksResumed: lambda _: "",
    ScriptUnread: lambda unread: unread.why,
}
# Fields that list all events of a kind, with their times, and fields that have the last one.
_LISTS: Mapping[type[Payload], str] = {
    CheckpointPassedOver: "passed_over", RanksRestarted: "restarts", HangDetected: "hangs",
    HangLimitRaised: "raised_limits", StragglerDetected: "stragglers", SharesChosen: "shares",
}  # fmt: skip
_LAST: Mapping[type[Payload], str] = {NetworkElected: "network", HardwareCompared: "hardware"}


@singledispatch
def _apply(payload: Payload, attempt: Attempt, event: AnyEvent) -> Attempt:
    """The attempt after this event; most kinds do not change it."""
    kind = type(payload)
    if kind in _ACTIVITY:
        attempt = _running(attempt, _ACTIVITY[kind](payload))
    changes: dict[str, Any] = {}
    if kind in _LISTS:
        before = getattr(attempt, _LISTS[kind])
        changes[_LISTS[kind]] = (*before, {"at": event.time, **payload.known_json()})
    elif kind in _LAST:
        changes[_LAST[kind]] = payload.known_json()
    return replace(attempt, **changes) if changes else attempt


@_apply.register
def _apply_submitting(payload: Submitting, attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(
        attempt,
        number=payload.attempt + attempt.restart,
        submission=payload.submission,
        submitted_at=event.time,
        overrides=tuple(payload.overrides),
        from_start=payload.from_start,
        submitted_from=payload.host,
        without=tuple(payload.without or ()),
        inherited=dict(payload.inherited or {}),
        executor=payload.executor,
        asked_by=payload.by,
        policy=payload.requeue,
        pack=_runs_of(payload.pack),
        share_gpu=bool((payload.pack or {}).get("share_gpu")),
    )


def _runs_of(pack: Mapping[str, Any] | None) -> int:
    """How many runs share a job, according to a journal."""
    runs = (pack or {}).get("runs")
    return runs if isinstance(runs, int) and runs > 1 else 1


@_apply.register
def _apply_submitted(payload: Submitted, attempt: Attempt, _event: AnyEvent) -> Attempt:
    processes = (*attempt.processes, payload.process) if payload.process else attempt.processes
    return replace(attempt, handed_over=True, processes=processes)


@_apply.register
def _apply_agent(payload: AgentStarted, attempt: Attempt, event: AnyEvent) -> Attempt:
    # Slurm manages the processes of its own jobs.
    is_ours = payload.executor == "local" and payload.process
    return replace(
        attempt,
        state="running",
        handed_over=True,
        number=attempt.number or payload.attempt,
        submission=attempt.submission or payload.submission or 0,
        started_at=event.time if attempt.started_at is None else min(attempt.started_at, event.time),
        processes=(*attempt.processes, payload.process) if is_ours and payload.process else attempt.processes,
        absent_since=None,
    )


@_apply.register
def _apply_waiting(payload: WaitingForRun, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, state="pending", reason=f"waits until run {payload.run} has ended")


@_apply.register
def _apply_waiting_for_slot(payload: WaitingForSlot, attempt: Attempt, _event: AnyEvent) -> Attempt:
    gpus = f" with {payload.gpus} free GPU(s) each" if payload.gpus else ""
    reason = f"waits for its turn: of its sweep, up to {payload.count} run at once on this machine{gpus}"
    if not payload.count:
        reason = f"waits for its turn: it needs {payload.gpus} GPU(s) of this machine that no other run has"
    return replace(attempt, state="pending", reason=reason)


@_apply.register
def _apply_rendezvous(payload: RendezvousReady, attempt: Attempt, _event: AnyEvent) -> Attempt:
    node = str(payload.node)
    return replace(
        attempt,
        state="running",
        reason="",
        master_addr=payload.master_addr,
        master_port=payload.master_port,
        interfaces={**attempt.interfaces, attempt.hosts.get(node, node): str(payload.interface)},
    )


@_apply.register
def _apply_clock(payload: ClockMeasured, attempt: Attempt, event: AnyEvent) -> Attempt:
    clock = {name: getattr(payload, name) for name in _CLOCK}
    return replace(attempt, clock={**attempt.clock, _host(attempt, event): clock})


@_apply.register
def _apply_preflight(payload: PreflightDone, attempt: Attempt, event: AnyEvent) -> Attempt:
    findings = [{name: finding.get(name) for name in _FINDING} for finding in payload.findings]
    return replace(attempt, checks={**attempt.checks, _host(attempt, event): findings})


def _host(attempt: Attempt, event: AnyEvent) -> str:
    """The host whose agent wrote this event; its node number if the host is unknown."""
    node = node_of(event.source)
    return attempt.hosts.get(node, f"node {node}")


@_apply.register
def _apply_workers(payload: WorkersStarted, attempt: Attempt, event: AnyEvent) -> Attempt:
    # Only local attempts know a process before their workers start; Slurm manages the processes of its own jobs.
    workers = payload.processes.values() if attempt.processes else ()
    # Node 0 looks for a checkpoint just before, and the clocks of nodes differ.
    began_from = attempt.left if node_of(event.source) == "0" else attempt.began_from
    return replace(attempt, processes=(*attempt.processes, *workers), began_from=began_from)


@_apply.register
def _apply_found(payload: CheckpointFound, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, left=payload.fingerprint)


@_apply.register
def _apply_session(payload: SessionStarted, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return _at_step(attempt, payload.step)


@_apply.register
def _apply_restored(payload: CheckpointRestored, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return _at_step(attempt, payload.step or 0)


@_apply.register
def _apply_script_steps(payload: ScriptProgressed, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return attempt if payload.step is None else _at_step(attempt, payload.step)


def _at_step(attempt: Attempt, step: int) -> Attempt:
    """The attempt with its ranks starting at this step; in the first round this is also where the attempt starts."""
    if attempt.restarts:
        return replace(attempt, round_step=step)
    return replace(attempt, first_step=step, last_step=step, round_step=step)


@_apply.register
def _apply_observed(payload: JobObserved, attempt: Attempt, event: AnyEvent) -> Attempt:
    if payload.state == ABSENT:
        return replace(attempt, absent_since=attempt.absent_since or event.time)
    if not is_final(payload.state or ""):
        return replace(attempt, handed_over=True, absent_since=None)
    # Slurm knows when a job began, even if the job died before its agent could journal it.
    return replace(attempt, started_at=attempt.started_at or payload.started_at)


@_apply.register
def _apply_requested(payload: NodesRequested, attempt: Attempt, _event: AnyEvent) -> Attempt:
    if payload.job_id is None:
        return attempt
    return _running(attempt, f"job {payload.job_id} waits for up to {payload.nodes} more node(s)")


@_apply.register
def _apply_command_completed(payload: CommandCompleted, attempt: Attempt, _event: AnyEvent) -> Attempt:
    clock = time.strftime("%H:%M", time.gmtime(payload.at))
    return _running(
        attempt,
        f"the command of node 0 completed at {clock} UTC, and {', '.join(payload.running)} still "
        f"{'runs' if len(payload.running) == 1 else 'run'}: with 'completed_by: node0', a run ends with node 0",
    )


@_apply.register
def _apply_kept(payload: NodesKept, attempt: Attempt, _event: AnyEvent) -> Attempt:
    # Its end, which follows, has a reason of its own.
    return replace(_running(attempt), reason=payload.why)


@_apply.register
def _apply_paused(payload: RanksPaused, attempt: Attempt, _event: AnyEvent) -> Attempt:
    after = f" after step {payload.step}" if payload.step is not None else ""
    return _running(attempt, f"paused{after}" + (f": {payload.activity}" if payload.activity else ""))


def _running(attempt: Attempt, reason: str = "") -> Attempt:
    """The attempt with what its ranks do, for as long as it runs."""
    return attempt if attempt.ended else replace(attempt, reason=reason)


@_apply.register
def _apply_apart(payload: RanksApart, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return _running(replace(attempt, evidence={**attempt.evidence, APART: payload.why}), payload.why)


@_apply.register
def _apply_end(payload: NodeEnded, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, last_word=True, evidence={**attempt.evidence, **payload.evidence})
