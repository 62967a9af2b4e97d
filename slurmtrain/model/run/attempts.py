"""Builds an attempt from its events, one kind at a time; :mod:`.outcome` determines how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.run.attempt_facts import AttemptFacts, SaveLog
from slurmtrain.model.run.events import agent_events, checkpoint_events, command_events, rank_events
from slurmtrain.model.run.events.base import AnyEvent, Payload, select
from slurmtrain.model.run.job_state import ABSENT, is_final
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.layout import attempt_key, attempt_of, node_of, split_attempt
from slurmtrain.model.run.outcome import began_at, superseded, with_outcome
from slurmtrain.model.run.run import APART, Attempt, replace

# Events of commands about a submission, and about one start of a job.
_OF_A_SUBMISSION = command_events.Submitting | command_events.Submitted | command_events.Unstarted
_OF_A_START = (
    command_events.JobObserved
    | agent_events.JobRequeue
    | agent_events.RequeueFailed
    | command_events.JobReplaced
    | command_events.UpstreamFailed
)
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
        key: [event.payload.submission for event in select(facts.events, agent_events.AgentStarted)]
        for key, facts in groups.items()
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
    if select(facts.events, agent_events.AgentStarted):
        return False
    return any(
        isinstance(event.payload, command_events.Unstarted | command_events.JobReplaced | agent_events.SurplusStart)
        for event in facts.events
    )


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
    hosts = {str(event.payload.node): event.payload.host for event in select(facts.events, agent_events.AgentStarted)}
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
        if changes := _changed_fields(attempt, event):
            attempt = replace(attempt, **changes)
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


# Kinds of events that an attempt lists with their times, and kinds whose last event it has; each with its field.
_LISTS = {
    "passed_over": "passed_over", "restart": "restarts", "hang": "hangs", "hang_limit": "raised_limits",
    "straggler": "stragglers", "shares": "shares",
}  # fmt: skip
_LAST = {"election": "network", "hardware": "hardware"}


def _changed_fields(attempt: Attempt, event: AnyEvent) -> dict[str, Any]:
    """The fields of an attempt that an event changes; for most kinds there are none."""
    payload = event.payload
    if (field := _LISTS.get(payload.kind)) is not None:
        changes: dict[str, Any] = {field: (*getattr(attempt, field), {"at": event.time, **payload.known_json()})}
    elif payload.kind in _LAST:
        changes = {_LAST[payload.kind]: payload.known_json()}
    else:
        changes = _changes_by_job(attempt, event) or _changes_by_command(attempt, event)
    activity = _activity(payload)
    return changes if activity is None else {**changes, "reason": activity}


def _activity(payload: Payload) -> str | None:
    """What an attempt does from this event on, or waits for, as long as it has not ended; None: no change."""
    match payload:
        case (
            agent_events.RanksRestarted()
            | agent_events.NodesJoined()
            | agent_events.RanksResumed()
            | agent_events.RendezvousReady()
        ):
            return ""
        case rank_events.ScriptUnread(why=why) | agent_events.NodesKept(why=why) | agent_events.RanksApart(why=why):
            return why
        case agent_events.RanksPaused(step=step, activity=activity):
            after = f" after step {step}" if step is not None else ""
            return f"paused{after}" + (f": {activity}" if activity else "")
        case agent_events.NodesRequested(job_id=str(job_id), nodes=nodes):
            return f"job {job_id} waits for up to {nodes} more node(s)"
        case agent_events.CommandCompleted(at=at, running=running):
            clock = time.strftime("%H:%M", time.gmtime(at))
            return (
                f"the command of node 0 completed at {clock} UTC, and {', '.join(running)} still "
                f"{'runs' if len(running) == 1 else 'run'}: with 'completed_by: node0', a run ends with node 0"
            )
        case agent_events.WaitingForRun(run=run):
            return f"waits until run {run} has ended"
        case agent_events.WaitingForSlot(count=0, gpus=gpus):
            return f"waits for its turn: it needs {gpus} free GPU(s) of this machine"
        case agent_events.WaitingForSlot(count=count, gpus=gpus):
            free = f" with {gpus} free GPU(s) each" if gpus else ""
            return f"waits for its turn: up to {count} runs of its sweep run at once on this machine{free}"
    return None


def _changes_by_command(attempt: Attempt, event: AnyEvent) -> dict[str, Any]:
    """As :func:`_changed_fields`, for events of commands."""
    match event.payload:
        case command_events.Submitting() as submitting:
            pack = submitting.pack or {}
            runs = pack.get("runs")
            return {
                "number": submitting.attempt + attempt.restart,
                "submission": submitting.submission,
                "submitted_at": event.time,
                "overrides": tuple(submitting.overrides),
                "from_start": submitting.from_start,
                "submitted_from": submitting.host,
                "without": tuple(submitting.without or ()),
                "inherited": dict(submitting.inherited or {}),
                "executor": submitting.executor,
                "partition": submitting.partition or "",
                "asked_by": submitting.by,
                "policy": submitting.requeue,
                "pack": runs if isinstance(runs, int) and runs > 1 else 1,
                "share_gpu": bool(pack.get("share_gpu")),
            }
        case command_events.Submitted(process=process):
            return {"handed_over": True, "processes": (*attempt.processes, *([process] if process else []))}
        case command_events.JobObserved(state=state) if state == ABSENT:
            # Slurm may only be slow to answer: the job counts as gone once it has been unknown for a while.
            return {"absent_since": attempt.absent_since or event.time}
        case command_events.JobObserved(state=state) if not is_final(state or ""):
            return {"handed_over": True, "absent_since": None}
        case command_events.JobObserved(started_at=started_at):
            # Slurm knows when a job began, even if the job died before its agent could journal it.
            return {"started_at": attempt.started_at or started_at}
    return {}


def _changes_by_job(attempt: Attempt, event: AnyEvent) -> dict[str, Any]:
    """As :func:`_changed_fields`, for events of agents and ranks."""
    node = node_of(event.source)
    host = attempt.hosts.get(node, f"node {node}")
    match event.payload:
        case agent_events.AgentStarted() as agent:
            # Slurm manages the processes of its own jobs.
            own = [agent.process] if agent.executor == "local" and agent.process else []
            partition = {str(agent.node): agent.partition} if agent.partition else {}
            return {
                "partitions": {**attempt.partitions, **partition},
                "state": "running",
                # A command may have been killed before it noted that the job was handed over.
                "handed_over": True,
                "number": attempt.number or agent.attempt,
                "submission": attempt.submission or agent.submission or 0,
                "started_at": event.time if attempt.started_at is None else min(attempt.started_at, event.time),
                "processes": (*attempt.processes, *own),
                "absent_since": None,
            }
        case agent_events.WaitingForRun() | agent_events.WaitingForSlot():
            return {"state": "pending"}
        case agent_events.RendezvousReady(node=number, master_addr=address, master_port=port, interface=interface):
            own_host = attempt.hosts.get(str(number), str(number))
            interfaces = {**attempt.interfaces, own_host: str(interface)}
            return {"state": "running", "master_addr": address, "master_port": port, "interfaces": interfaces}
        case agent_events.ClockMeasured() as clock:
            return {"clock": {**attempt.clock, host: {name: getattr(clock, name) for name in _CLOCK}}}
        case agent_events.PreflightDone(findings=findings):
            kept = [{name: finding.get(name) for name in _FINDING} for finding in findings]
            return {"checks": {**attempt.checks, host: kept}}
        case agent_events.WorkersStarted(processes=processes):
            # Only local attempts know a process before their workers start; Slurm manages the processes of its own.
            workers = processes.values() if attempt.processes else ()
            # Node 0 looks for a checkpoint just before, and the clocks of nodes differ.
            began_from = attempt.left if node == "0" else attempt.began_from
            return {"processes": (*attempt.processes, *workers), "began_from": began_from}
        case checkpoint_events.CheckpointFound(fingerprint=fingerprint):
            return {"left": fingerprint}
        case rank_events.ScriptProgressed(step=None):
            return {}
        case (
            rank_events.SessionStarted(step=step)
            | checkpoint_events.CheckpointRestored(step=step)
            | rank_events.ScriptProgressed(step=step)
        ):
            begun = step or 0
            # In the first round, this is also where the attempt starts.
            first = {} if attempt.restarts else {"first_step": begun, "last_step": begun}
            return {"round_step": begun, **first}
        case agent_events.RanksApart(why=why):
            return {"evidence": {**attempt.evidence, APART: why}}
        case agent_events.NodeEnded(evidence=evidence):
            return {"last_word": True, "evidence": {**attempt.evidence, **evidence}}
    return {}
