"""The state of a run, from everything that is known of it: a pure fold over its events.

The fold looks at a set of facts, never at the order in which they became known, so reading journals in another order,
or again from the start, gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slurmtrain.model.interruption.policy import decision
from slurmtrain.model.run.accounting import accounted, goodput
from slurmtrain.model.run.checkpoints import checkpoints_of
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.job_state import ABSENT, is_final
from slurmtrain.model.run.layout import attempt_key, attempt_of, node_of, split_attempt
from slurmtrain.model.run.outcome import begin, superseded, with_outcome
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.requeue import PREFLIGHT, given_up, in_words, is_over
from slurmtrain.model.run.run import ENDED, Attempt, Checkpoint, Run

_HANDING = ("submitting", "submitted", "unstarted")
# What a command says of one start of a job.
_OF_A_START = ("observed", "requeue", "requeue_failed", "replaced")
# What of a clock, and of a finding, is kept with the attempt; the evidence stays in the journal.
_CLOCK = ("offset_ms", "bound_ms", "disciplined", "source")
_FINDING = ("check", "status", "summary")


def fold(run_id: str, events: Iterable[AnyEvent], progress: Mapping[str, Progress]) -> Run:
    """The run that these facts describe.

    ``progress`` holds, for each attempt by the name of its directory, what its metrics say.
    """
    facts = sorted(events, key=lambda event: event.order)
    by_attempt = _group(facts)
    cancels = [event.time for event in facts if event.kind == "cancel"]
    started = {key: group for key, group in by_attempt.items() if not _unstarted(group)}
    known = {key: _attempt(key, group, progress.get(key, Progress()), cancels) for key, group in started.items()}
    ordered = _in_order(known, started)
    checkpoints = checkpoints_of(facts, ordered)
    attempts = _with_next(accounted(ordered, started, progress, checkpoints), checkpoints, by_attempt)
    created = next((event for event in facts if event.kind == "created"), None)
    born = created.data if created else {}
    state, reason = _run_state(attempts, cancels, facts)
    mlflow = [event.data.get("mlflow_run_id") for event in facts if event.kind == "mlflow"]
    lost = [attempt.lost_steps for attempt in attempts if attempt.lost_steps is not None]
    steps = [attempt.last_step for attempt in attempts if attempt.last_step is not None]
    totals = [event.data.get("total_steps") for event in facts if event.kind == "total"]
    metrics: dict[str, float] = {}
    for attempt in attempts:
        metrics.update(progress.get(attempt.key, Progress()).metrics)
    return Run(
        id=run_id,
        name=str(born.get("name", run_id)),
        state=state,
        reason=reason,
        executor=str(born.get("executor", "local")),
        plan_hash=born.get("plan_hash"),
        submitted_at=created.time if created else None,
        started_at=min((a.started_at for a in attempts if a.started_at is not None), default=None),
        ended_at=(attempts[-1].ended_at if attempts else cancels[-1] if cancels else None) if state in ENDED else None,
        step=steps[-1] if steps else None,
        total_steps=totals[-1] if totals else None,
        metrics=metrics,
        lost_steps=sum(lost) if lost else (0 if steps else None),
        mlflow_run_id=mlflow[-1] if mlflow else None,
        git=born.get("git"),
        attempts=attempts,
        checkpoints=checkpoints,
        cancelled=any(time >= (begin(attempts[-1]) if attempts else 0.0) for time in cancels),
        save_problem=attempts[-1].save_problem if attempts else "",
        goodput=goodput(attempts),
    )


def _group(facts: Sequence[AnyEvent]) -> dict[str, list[AnyEvent]]:
    """Events by the attempt they belong to: by the journal's folder, or by what a command's event names.

    What is said of a submission belongs to every start of its job, or to an attempt without a job as long as none is
    known.
    """
    groups: dict[str, list[AnyEvent]] = {}
    handings: dict[int, list[AnyEvent]] = {}
    for event in facts:
        if own := attempt_of(event.source):
            groups.setdefault(own, []).append(event)
        elif event.kind in _HANDING:
            handings.setdefault(int(event.data.get("submission", 0)), []).append(event)
        elif event.kind in _OF_A_START and "job_id" in event.data:
            key = attempt_key(str(event.data["job_id"]), int(event.data.get("restart", 0)))
            groups.setdefault(key, []).append(event)
    for number, said in handings.items():
        jobs = {str(event.data["job_id"]) for event in said if event.data.get("job_id")}
        jobs |= {key.rpartition(".")[0] for key, group in groups.items() if _submission(group) == number}
        keys = [key for key in groups if key.rpartition(".")[0] in jobs] or [attempt_key(job, 0) for job in jobs]
        for key in keys or [f"{number}?"]:
            groups[key] = sorted([*groups.get(key, []), *said], key=lambda event: event.order)
    return groups


def _submission(events: Sequence[AnyEvent]) -> int | None:
    """Which submission an attempt's own agents name."""
    return next((int(e.data["submission"]) for e in events if e.kind == "agent" and "submission" in e.data), None)


def _unstarted(events: Sequence[AnyEvent]) -> bool:
    """Whether handing this attempt over failed, so that it never was one."""
    kinds = {event.kind for event in events}
    return "agent" not in kinds and bool(kinds & {"unstarted", "replaced", "surplus"})


def _attempt(key: str, events: Sequence[AnyEvent], progress: Progress, cancels: Sequence[float]) -> Attempt:
    """One attempt from its own events, its progress, and the times at which a person cancelled the run."""
    job_id, restart = split_attempt(key) or ("", 0)
    hosts = {str(event.data["node"]): str(event.data["host"]) for event in events if event.kind == "agent"}
    state = "requeued" if restart else "pending"
    attempt = Attempt(number=0, job_id=job_id, restart=restart, state=state, hosts=hosts)
    for event in events:
        if event.kind in _TELLERS:
            attempt = _TELLERS[event.kind](attempt, event)
    if progress.last_step is not None:
        attempt = replace(attempt, last_step=progress.last_step)
    return with_outcome(attempt, events, cancels)


def _told_submitting(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(
        attempt,
        number=int(event.data.get("attempt", 0)) + attempt.restart,
        submission=int(event.data.get("submission", 0)),
        submitted_at=event.time,
        overrides=tuple(event.data.get("overrides", ())),
        from_start=bool(event.data.get("from_start", False)),
        submitted_from=event.data.get("host"),
        without=tuple(event.data.get("without", ())),
        executor=str(event.data.get("executor", "")),
        asked_by=str(event.data.get("by", "submit")),
        policy=event.data.get("requeue"),
    )


def _told_submitted(attempt: Attempt, event: AnyEvent) -> Attempt:
    process = event.data.get("process")
    return replace(attempt, handed_over=True, processes=(*attempt.processes, *([process] if process else ())))


def _told_agent(attempt: Attempt, event: AnyEvent) -> Attempt:
    # The processes of a job of Slurm's are Slurm's to look after.
    process = event.data.get("process") if event.data.get("executor", "local") == "local" else None
    return replace(
        attempt,
        state="running",
        handed_over=True,
        number=attempt.number or int(event.data.get("attempt", 0)),
        submission=attempt.submission or int(event.data.get("submission", 0)),
        started_at=event.time if attempt.started_at is None else min(attempt.started_at, event.time),
        processes=(*attempt.processes, *([process] if process else ())),
        absent_since=None,
    )


def _told_waiting(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, state="pending", reason=f"waits until run {event.data['run']} has ended")


def _told_rendezvous(attempt: Attempt, event: AnyEvent) -> Attempt:
    node = str(event.data.get("node", 0))
    host = attempt.hosts.get(node, node)
    return replace(
        attempt,
        state="running",
        reason="",
        master_addr=event.data.get("master_addr"),
        master_port=event.data.get("master_port"),
        interfaces={**attempt.interfaces, host: str(event.data.get("interface"))},
    )


def _told_election(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, network=event.data)


def _told_clock(attempt: Attempt, event: AnyEvent) -> Attempt:
    said = {name: event.data.get(name) for name in _CLOCK}
    return replace(attempt, clock={**attempt.clock, _host(attempt, event): said})


def _told_preflight(attempt: Attempt, event: AnyEvent) -> Attempt:
    found = [{name: finding.get(name) for name in _FINDING} for finding in event.data.get("findings", ())]
    return replace(attempt, checks={**attempt.checks, _host(attempt, event): found})


def _host(attempt: Attempt, event: AnyEvent) -> str:
    """The host whose agent's journal this event stands in, or that journal's node where it has not told its host."""
    node = node_of(event.source)
    return attempt.hosts.get(node, f"node {node}")


def _told_workers(attempt: Attempt, event: AnyEvent) -> Attempt:
    workers = event.data.get("processes", {}).values() if attempt.processes else ()
    return replace(attempt, processes=(*attempt.processes, *workers))


def _told_session(attempt: Attempt, event: AnyEvent) -> Attempt:
    step = int(event.data.get("step", 0))
    if attempt.restarts:
        return replace(attempt, round_step=step)
    return replace(attempt, first_step=step, last_step=step, round_step=step)


def _told_interval(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, interval=event.data)


def _told_saved(attempt: Attempt, _event: AnyEvent) -> Attempt:
    return replace(attempt, save_problem="")


def _told_save_failed(attempt: Attempt, event: AnyEvent) -> Attempt:
    problem = f"the checkpoint of step {event.data.get('step')} failed: {event.data.get('reason')}"
    return replace(attempt, save_problem=problem)


def _told_observed(attempt: Attempt, event: AnyEvent) -> Attempt:
    state = str(event.data.get("state"))
    if state == ABSENT:
        return replace(attempt, absent_since=attempt.absent_since or event.time)
    if not is_final(state):
        return replace(attempt, handed_over=True, absent_since=None)
    # Slurm knows when a job began that did not live to say so itself.
    return replace(attempt, started_at=attempt.started_at or event.data.get("started_at"))


def _told_restart(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, restarts=(*attempt.restarts, {"at": event.time, **event.data}))


def _told_hang(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, hangs=(*attempt.hangs, {"at": event.time, **event.data}))


def _told_straggler(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, stragglers=(*attempt.stragglers, {"at": event.time, **event.data}))


def _told_end(attempt: Attempt, event: AnyEvent) -> Attempt:
    return replace(attempt, last_word=True, evidence={**attempt.evidence, **event.data.get("evidence", {})})


_TELLERS = {
    "restart": _told_restart,
    "hang": _told_hang,
    "straggler": _told_straggler,
    "end": _told_end,
    "submitting": _told_submitting,
    "submitted": _told_submitted,
    "agent": _told_agent,
    "waiting": _told_waiting,
    "election": _told_election,
    "clock": _told_clock,
    "preflight": _told_preflight,
    "rendezvous": _told_rendezvous,
    "workers": _told_workers,
    "session": _told_session,
    "restored": _told_session,
    "interval": _told_interval,
    "saved": _told_saved,
    "save_failed": _told_save_failed,
    "observed": _told_observed,
}


def _in_order(attempts: Mapping[str, Attempt], groups: Mapping[str, Sequence[AnyEvent]]) -> list[Attempt]:
    """In the order in which they were started, numbered from 1; of one job only the last start can be under way.

    Nodes that one start of a job excluded, all later ones go without.
    """
    last = {attempt.job_id: attempt.restart for attempt in sorted(attempts.values(), key=lambda a: a.restart)}
    known = [
        superseded(attempt, groups[key]) if attempt.restart < last[attempt.job_id] else attempt
        for key, attempt in attempts.items()
    ]
    ordered = sorted(known, key=lambda a: (a.submission, begin(a), a.restart, a.number))
    numbered = []
    excluded: dict[str, tuple[str, ...]] = {}
    for index, attempt in enumerate(ordered, 1):
        before = excluded.get(attempt.job_id, ())
        excluded[attempt.job_id] = (*before, *attempt.excluded)
        # Only of the newest attempt it matters who starts the run again.
        by = attempt.restarted_by if index == len(ordered) else None
        without = tuple(dict.fromkeys((*attempt.without, *before)))
        numbered.append(replace(attempt, number=index, restarted_by=by, without=without))
    return numbered


def _with_next(
    attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], groups: Mapping[str, Sequence[AnyEvent]]
) -> list[Attempt]:
    """Fill in who starts the run again after its newest attempt, and from when on, if that has ended."""
    if not attempts:
        return []
    newest = attempts[-1]
    # What is said of a later start that never began, because a command has ended the job to submit another.
    later = [e for key, group in groups.items() if _follows(key, newest) for e in group if e.kind == "replaced"]
    told = [*groups.get(newest.key, ()), *later]
    over = newest.executor == "local" or is_over(told)
    if not newest.ended or newest.policy is None or newest.cause in ("completed", "cancelled"):
        by = "sync" if newest.restarted_by is not None and over else newest.restarted_by
        return [*attempts[:-1], replace(newest, restarted_by=by)]
    decided = decision(attempts, checkpoints)
    asked = newest.restarted_by is not None
    if not asked and (newest.cause == PREFLIGHT or given_up(told) or not decided.again):
        why = "" if newest.cause == PREFLIGHT else given_up(told) or decided.why
        return [*attempts[:-1], replace(newest, reason="; ".join(filter(None, (newest.reason, why))))]
    at = (newest.ended_at or 0.0) + decided.delay_s if decided.delay_s else None
    return [*attempts[:-1], replace(newest, restarted_by="sync" if over else "slurm", again_at=at)]


def _follows(key: str, attempt: Attempt) -> bool:
    """Whether this is a later start of the attempt's job."""
    job_id, restart = split_attempt(key) or ("", 0)
    return job_id == attempt.job_id and restart > attempt.restart


def _run_state(attempts: Sequence[Attempt], cancels: Sequence[float], facts: Sequence[AnyEvent]) -> tuple[str, str]:
    if attempts:
        return _state_after(attempts, cancels)
    if cancels:
        return "cancelled", "cancelled before it started"
    refusals = [str(event.data.get("reason", "")) for event in facts if event.kind == "unstarted"]
    return "created", refusals[-1] if refusals else "not handed to the scheduler yet"


def _state_after(attempts: Sequence[Attempt], cancels: Sequence[float]) -> tuple[str, str]:
    """The state of the newest attempt, but for a run that starts again though that has ended."""
    newest, before = attempts[-1], next(reversed(attempts[:-1]), None)
    if newest.restarted_by is not None:
        if newest.restarted_by == "sync" and any(time >= begin(newest) for time in cancels):
            return "cancelled", f"cancelled; before that, {newest.reason}"
        at = newest.again_at
        after = f", {at - (newest.ended_at or 0.0):.0f} s after it ended" if at is not None else ""
        problem = newest.requeue_problem
        return "requeued", in_words(newest.reason, newest.excluded, newest.restarted_by, problem, after)
    if newest.state == "requeued" and before is not None and before.job_id == newest.job_id and before.cause:
        return newest.state, in_words(before.reason, before.excluded, "slurm", before.requeue_problem)
    return newest.state, newest.reason
