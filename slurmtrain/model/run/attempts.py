"""Builds an attempt from its events, one kind at a time; :mod:`.outcome` determines how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

from slurmtrain.model.run.attempt_facts import AttemptFacts, SaveLog
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
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.layout import attempt_key, attempt_of, node_of, split_attempt
from slurmtrain.model.run.outcome import began_at, superseded, with_outcome
from slurmtrain.model.run.run import APART, Attempt, replace

# Events of commands about a submission, and about one start of a job.
_OF_A_SUBMISSION = Submitting | Submitted | Unstarted
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
        # Commands write into journals of the run: their events name their subject.
        elif isinstance(payload, _OF_A_SUBMISSION):
            submissions.setdefault(payload.submission, []).append(event)
        elif isinstance(payload, _OF_A_START) and payload.job_id is not None:
            key = attempt_key(payload.job_id, payload.restart or 0)
            groups.setdefault(key, AttemptFacts()).events.append(event)
    # If nothing else says which attempt came first, their first events decide.
    groups = dict(sorted(groups.items(), key=lambda item: (item[1].first, item[0])))
    # The submission that its own agents name.
    named = {
        key: [event.payload.submission for event in select(facts.events, AgentStarted)] for key, facts in groups.items()
    }
    for number, about in submissions.items():
        payloads = (event.payload for event in about)
        jobs = {job for each in payloads if isinstance(each, _OF_A_SUBMISSION) and (job := each.job_id)}
        for key, numbers in named.items():
            if next((each for each in numbers if each is not None), None) == number:
                jobs.add(key.rpartition(".")[0])
        keys = [key for key in groups if key.rpartition(".")[0] in jobs] or [attempt_key(job, 0) for job in jobs]
        for key in keys or [f"{number}?"]:
            facts = groups.setdefault(key, AttemptFacts())
            facts.events = sorted([*facts.events, *about], key=lambda event: event.order)
    return groups


def never_started(facts: AttemptFacts) -> bool:
    """Whether this attempt never began: its submission failed, its job was replaced, or the run was already over."""
    # An agent that has spoken has begun, whatever a command noted of its submission.
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
    # All hosts first: the clocks of nodes differ, so that a node may seem to speak before it has started.
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
    # Metrics are written after each step, events about steps only now and then.
    if progress.last_step is not None:
        attempt = replace(attempt, last_step=progress.last_step)
    return with_outcome(attempt, facts.events, cancels)


def number_attempts(attempts: Mapping[str, Attempt], facts: Mapping[str, AttemptFacts]) -> list[Attempt]:
    """The attempts in the order they were started, numbered from 1.

    Only the last start of a job can be in progress; earlier ones are closed. Nodes that one start of a job excluded
    stay excluded for all later ones. ``attempts`` and ``facts`` are by the attempt's key.
    """
    # The highest start wins: a job has one start at a time.
    last = {attempt.job_id: attempt.restart for attempt in sorted(attempts.values(), key=lambda a: a.restart)}
    closed = [
        superseded(attempt, facts[key]) if attempt.restart < last[attempt.job_id] else attempt
        for key, attempt in attempts.items()
    ]
    ordered = sorted(closed, key=lambda a: (a.submission, began_at(a), a.restart, a.number))
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
    changes: dict[str, Any] = {}
    if (activity := _activity(payload)) is not None:
        changes["reason"] = activity
    if kind in _LISTS:
        before = getattr(attempt, _LISTS[kind])
        changes[_LISTS[kind]] = (*before, {"at": event.time, **payload.known_json()})
    elif kind in _LAST:
        changes[_LAST[kind]] = payload.known_json()
    return replace(attempt, **changes) if changes else attempt


def _activity(payload: Payload) -> str | None:
    """What an attempt does from this event on, or waits for, as long as it has not ended; None: no change."""
    match payload:
        case RanksRestarted() | NodesJoined() | RanksResumed():
            return ""
        case ScriptUnread(why=why) | NodesKept(why=why):
            return why
        case RanksPaused(step=step, activity=activity):
            after = f" after step {step}" if step is not None else ""
            return f"paused{after}" + (f": {activity}" if activity else "")
        case NodesRequested(job_id=str(job_id), nodes=nodes):
            return f"job {job_id} waits for up to {nodes} more node(s)"
        case CommandCompleted(at=at, running=running):
            clock = time.strftime("%H:%M", time.gmtime(at))
            return (
                f"the command of node 0 completed at {clock} UTC, and {', '.join(running)} still "
                f"{'runs' if len(running) == 1 else 'run'}: with 'completed_by: node0', a run ends with node 0"
            )
        case WaitingForRun(run=run):
            return f"waits until run {run} has ended"
        case WaitingForSlot(count=0, gpus=gpus):
            return f"waits for its turn: it needs {gpus} GPU(s) of this machine that no other run has"
        case WaitingForSlot(count=count, gpus=gpus):
            free = f" with {gpus} free GPU(s) each" if gpus else ""
            return f"waits for its turn: of its sweep, up to {count} run at once on this machine{free}"
    return None


@_apply.register
def _(payload: Submitting, attempt: Attempt, event: AnyEvent) -> Attempt:
    pack = payload.pack or {}
    runs = pack.get("runs")
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
        pack=runs if isinstance(runs, int) and runs > 1 else 1,
        share_gpu=bool(pack.get("share_gpu")),
    )


@_apply.register
def _(payload: Submitted, attempt: Attempt, _event: AnyEvent) -> Attempt:
    processes = (*attempt.processes, payload.process) if payload.process else attempt.processes
    return replace(attempt, handed_over=True, processes=processes)


@_apply.register
def _(payload: AgentStarted, attempt: Attempt, event: AnyEvent) -> Attempt:
    # Slurm manages the processes of its own jobs.
    is_ours = payload.executor == "local" and payload.process
    return replace(
        attempt,
        # A command may have been killed before it noted that the job was handed over.
        state="running",
        handed_over=True,
        number=attempt.number or payload.attempt,
        submission=attempt.submission or payload.submission or 0,
        started_at=event.time if attempt.started_at is None else min(attempt.started_at, event.time),
        processes=(*attempt.processes, payload.process) if is_ours and payload.process else attempt.processes,
        absent_since=None,
    )


@_apply.register
def _(payload: WaitingForRun | WaitingForSlot, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, state="pending", reason=_activity(payload) or "")


@_apply.register
def _(payload: RendezvousReady, attempt: Attempt, _event: AnyEvent) -> Attempt:
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
def _(payload: ClockMeasured, attempt: Attempt, event: AnyEvent) -> Attempt:
    clock = {name: getattr(payload, name) for name in _CLOCK}
    return replace(attempt, clock={**attempt.clock, _host(attempt, event): clock})


@_apply.register
def _(payload: PreflightDone, attempt: Attempt, event: AnyEvent) -> Attempt:
    findings = [{name: finding.get(name) for name in _FINDING} for finding in payload.findings]
    return replace(attempt, checks={**attempt.checks, _host(attempt, event): findings})


def _host(attempt: Attempt, event: AnyEvent) -> str:
    """The host whose agent wrote this event; its node number if the host is unknown."""
    node = node_of(event.source)
    return attempt.hosts.get(node, f"node {node}")


@_apply.register
def _(payload: WorkersStarted, attempt: Attempt, event: AnyEvent) -> Attempt:
    # Only local attempts know a process before their workers start; Slurm manages the processes of its own jobs.
    workers = payload.processes.values() if attempt.processes else ()
    # Node 0 looks for a checkpoint just before, and the clocks of nodes differ.
    began_from = attempt.left if node_of(event.source) == "0" else attempt.began_from
    return replace(attempt, processes=(*attempt.processes, *workers), began_from=began_from)


@_apply.register
def _(payload: CheckpointFound, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, left=payload.fingerprint)


@_apply.register
def _(payload: SessionStarted | CheckpointRestored | ScriptProgressed, attempt: Attempt, _event: AnyEvent) -> Attempt:
    step = payload.step
    if step is None and isinstance(payload, ScriptProgressed):
        return attempt
    attempt = replace(attempt, round_step=step or 0)
    # In the first round, this is also where the attempt starts.
    return attempt if attempt.restarts else replace(attempt, first_step=step or 0, last_step=step or 0)


@_apply.register
def _(payload: JobObserved, attempt: Attempt, event: AnyEvent) -> Attempt:
    if payload.state == ABSENT:
        # Slurm may only be slow to answer: the job counts as gone once it has been unknown for a while.
        return replace(attempt, absent_since=attempt.absent_since or event.time)
    if not is_final(payload.state or ""):
        return replace(attempt, handed_over=True, absent_since=None)
    # Slurm knows when a job began, even if the job died before its agent could journal it.
    return replace(attempt, started_at=attempt.started_at or payload.started_at)


@_apply.register
def _(payload: RanksApart, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, evidence={**attempt.evidence, APART: payload.why}, reason=payload.why)


@_apply.register
def _(payload: NodeEnded, attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, last_word=True, evidence={**attempt.evidence, **payload.evidence})
