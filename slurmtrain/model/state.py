"""The state of a run, from everything that is known of it: a pure fold over its events.

The fold looks at a set of facts, never at the order in which they became known, so reading journals in another order,
or again from the start, gives the same answer. What the job says of itself outranks what was observed from outside:
a job that says it completed has completed, and "its processes are gone" decides only where the job said nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.model.event import Event
from slurmtrain.model.layout import attempt_key, split_attempt
from slurmtrain.model.progress import Progress

RUN_STATES = ("created", "pending", "running", "requeued", "completed", "failed", "cancelled", "lost")
ENDED = frozenset({"completed", "failed", "cancelled", "lost"})
CAUSES = (
    "completed", "preempted", "timeout", "node_fail", "oom", "crash", "hang", "preflight", "cancelled", "lost",
)  # fmt: skip

# Where checkpoints of our own kind lie, relative to the run directory.
_PUBLISHED = "checkpoints/step-"

# What an attempt that ended for this cause makes of its run, as long as nobody starts it again.
STATE_OF_CAUSE = {"completed": "completed", "cancelled": "cancelled", "lost": "lost"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on disk. ``path`` is relative to the run directory, or absolute outside it."""

    step: int | None
    path: str
    bytes: int
    saved_at: float
    seconds: float | None
    complete: bool = True
    verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run on nodes. Times are seconds since 1970; steps count finished steps."""

    number: int
    job_id: str
    restart: int
    state: str = "pending"
    cause: str | None = None
    reason: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    lost_steps: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    interfaces: Mapping[str, str] = field(default_factory=dict)
    clock: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failures: Sequence[Mapping[str, Any]] = ()
    overrides: Sequence[str] = ()
    from_start: bool = False
    processes: Sequence[Mapping[str, Any]] = ()
    handed_over: bool = False
    submitted_from: str | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def key(self) -> str:
        return attempt_key(self.job_id, self.restart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a run."""

    id: str
    name: str
    state: str
    reason: str
    executor: str
    plan_hash: str | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    step: int | None = None
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost_steps: int | None = None
    mlflow_run_id: str | None = None
    git: Mapping[str, Any] | None = None
    attempts: Sequence[Attempt] = ()
    checkpoints: Sequence[Checkpoint] = ()
    cancelled: bool = False
    """Whether a person asked to end the newest attempt."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one that a run can go on from."""
        complete = [checkpoint for checkpoint in self.checkpoints if checkpoint.complete]
        return complete[-1] if complete else None

    @property
    def newest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def fold(run_id: str, events: Iterable[Event], progress: Mapping[str, Progress]) -> Run:
    """The run that these facts describe.

    ``progress`` holds, for each attempt by the name of its directory, what its metrics say.
    """
    facts = sorted(events, key=lambda event: event.order)
    by_attempt = _group(facts)
    checkpoints = _checkpoints(facts)
    cancels = [event.time for event in facts if event.kind == "cancel"]
    started = {key: group for key, group in by_attempt.items() if not _unstarted(group)}
    attempts = [_attempt(key, group, progress.get(key, Progress()), cancels) for key, group in started.items()]
    attempts = _with_lost_steps(_numbered(attempts), checkpoints)
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
        cancelled=any(time >= (_begin(attempts[-1]) if attempts else 0.0) for time in cancels),
    )


def _group(facts: Sequence[Event]) -> dict[str, list[Event]]:
    """Events by the attempt they belong to: by the journal's folder, or by the job that a command's event names."""
    groups: dict[str, list[Event]] = {}
    for event in facts:
        parts = event.source.split("/")
        if parts[0] == "attempts" and len(parts) > 2:
            groups.setdefault(parts[1], []).append(event)
        elif "job_id" in event.data:
            groups.setdefault(attempt_key(str(event.data["job_id"]), int(event.data.get("restart", 0))), []).append(
                event
            )
    return groups


def _unstarted(events: Sequence[Event]) -> bool:
    """Whether handing this attempt over failed, so that it never was one."""
    kinds = {event.kind for event in events}
    return "unstarted" in kinds and "agent" not in kinds


def _attempt(key: str, events: Sequence[Event], progress: Progress, cancels: Sequence[float]) -> Attempt:
    """One attempt from its own events, its progress, and the times at which a person cancelled the run."""
    job_id, restart = split_attempt(key) or (key, 0)
    attempt = Attempt(number=0, job_id=job_id, restart=restart)
    for event in events:
        if event.kind in _TELLERS:
            attempt = _TELLERS[event.kind](attempt, event)
    if progress.last_step is not None:
        attempt = replace(attempt, last_step=progress.last_step)
    return _ending(attempt, events, cancels)


def _told_submitting(attempt: Attempt, event: Event) -> Attempt:
    return replace(
        attempt,
        number=int(event.data.get("attempt", 0)),
        submitted_at=event.time,
        overrides=tuple(event.data.get("overrides", ())),
        from_start=bool(event.data.get("from_start", False)),
        submitted_from=event.data.get("host"),
    )


def _told_submitted(attempt: Attempt, event: Event) -> Attempt:
    process = event.data.get("process")
    return replace(attempt, handed_over=True, processes=(*attempt.processes, *([process] if process else ())))


def _told_agent(attempt: Attempt, event: Event) -> Attempt:
    process = event.data.get("process")
    return replace(
        attempt,
        state="running",
        handed_over=True,
        number=attempt.number or int(event.data.get("attempt", 0)),
        hosts={**attempt.hosts, str(event.data["node"]): str(event.data["host"])},
        started_at=event.time if attempt.started_at is None else min(attempt.started_at, event.time),
        processes=(*attempt.processes, *([process] if process else ())),
    )


def _told_waiting(attempt: Attempt, event: Event) -> Attempt:
    return replace(attempt, state="pending", reason=f"waits until run {event.data['run']} has ended")


def _told_rendezvous(attempt: Attempt, event: Event) -> Attempt:
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


def _told_workers(attempt: Attempt, event: Event) -> Attempt:
    return replace(attempt, processes=(*attempt.processes, *event.data.get("processes", {}).values()))


def _told_session(attempt: Attempt, event: Event) -> Attempt:
    step = int(event.data.get("step", 0))
    return replace(attempt, first_step=step, last_step=step)


_TELLERS = {
    "submitting": _told_submitting,
    "submitted": _told_submitted,
    "agent": _told_agent,
    "waiting": _told_waiting,
    "rendezvous": _told_rendezvous,
    "workers": _told_workers,
    "session": _told_session,
    "restored": _told_session,
}


def _ending(attempt: Attempt, events: Sequence[Event], cancels: Sequence[float]) -> Attempt:
    """Whether, when and why the attempt ended."""
    ends = [event for event in events if event.kind == "end"]
    gone = next((event for event in events if event.kind == "observed" and event.data.get("state") == "gone"), None)
    agents = [event for event in events if event.kind == "agent"]
    nodes = max((int(event.data.get("nodes", 1)) for event in agents), default=0)
    all_said = nodes > 0 and len({event.source for event in ends}) >= nodes
    if not (all_said or gone):
        return attempt
    cancelled_at = next((time for time in cancels if time >= _begin(attempt)), None)
    if all_said and all(event.data.get("cause") == "completed" for event in ends):
        return _closed(attempt, "completed", "", max(event.time for event in ends))
    root = min((event for event in ends if event.data.get("cause") != "completed"), key=_blame, default=None)
    if root is not None and (cancelled_at is None or _when_failed(root) < cancelled_at):
        at = max(event.time for event in ends)
        failed = replace(attempt, failures=tuple(root.data.get("failures", ())))
        return _closed(failed, str(root.data.get("cause")), str(root.data.get("reason", "")), at)
    at = max((event.time for event in ends), default=float(gone.data["last_seen"]) if gone else 0.0)
    if cancelled_at is not None:
        return _closed(attempt, "cancelled", "cancelled" + _at_step(attempt), max(at, cancelled_at))
    assert gone is not None
    return _closed(attempt, "lost", str(gone.data.get("reason", "")) + _at_step(attempt), at)


def _begin(attempt: Attempt) -> float:
    return attempt.submitted_at or attempt.started_at or 0.0


def _blame(end: Event) -> tuple[bool, float]:
    """What failed first is to blame, but for what failed because something else had."""
    return (bool(end.data.get("cascade", False)), _when_failed(end))


def _when_failed(end: Event) -> float:
    return float(end.data.get("failed_at") or end.time)


def _at_step(attempt: Attempt) -> str:
    return f" after step {attempt.last_step}" if attempt.last_step is not None else ""


def _closed(attempt: Attempt, cause: str, reason: str, at: float) -> Attempt:
    state = STATE_OF_CAUSE.get(cause, "failed")
    return replace(attempt, state=state, cause=cause, reason=reason, ended_at=at)


def _numbered(attempts: Sequence[Attempt]) -> list[Attempt]:
    """In the order in which they were started, numbered from 1."""
    ordered = sorted(attempts, key=lambda a: (_begin(a), a.restart, a.number))
    return [replace(attempt, number=index) for index, attempt in enumerate(ordered, 1)]


def _with_lost_steps(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> list[Attempt]:
    """Fill in what each ended attempt lost: the steps that it finished and that the next one does again.

    Until a next attempt has begun to train, that is counted from the newest checkpoint.
    """
    newest = max((c.step for c in checkpoints if c.complete and c.step is not None), default=0)
    result = []
    for index, attempt in enumerate(attempts):
        lost = None
        if attempt.last_step is not None and attempt.ended:
            later = (a.first_step for a in attempts[index + 1 :] if a.first_step is not None)
            goes_on_from = attempt.last_step if attempt.cause == "completed" else next(later, newest)
            lost = max(0, attempt.last_step - goes_on_from)
        result.append(replace(attempt, lost_steps=lost))
    return result


def _checkpoints(facts: Sequence[Event]) -> list[Checkpoint]:
    """What is on disk, oldest first."""
    kept: dict[str, Checkpoint] = {}
    for event in facts:
        data = event.data
        if event.kind in ("saved", "restored", "found"):
            kept.pop(str(data["path"]), None)
            kept[str(data["path"])] = _checkpoint(data, event, verified=event.kind == "restored")
        elif event.kind == "observed" and "checkpoints" in data:
            there = {str(found["path"]): found for found in data["checkpoints"]}
            # A kill between deleting a checkpoint, or publishing one, and saying so: the disk is right.
            for path in [path for path in kept if path.startswith(_PUBLISHED) and path not in there]:
                kept.pop(path)
            for path, found in there.items():
                kept.setdefault(path, _checkpoint(found, event, verified=False))
        elif event.kind == "rejected" and str(data["path"]) in kept:
            kept[str(data["path"])] = replace(kept[str(data["path"])], complete=False)
        elif event.kind == "pruned":
            kept.pop(str(data["path"]), None)
    return sorted(kept.values(), key=lambda c: (c.step if c.step is not None else -1, c.saved_at))


def _checkpoint(data: Mapping[str, Any], event: Event, *, verified: bool) -> Checkpoint:
    return Checkpoint(
        step=data.get("step"),
        path=str(data["path"]),
        bytes=int(data.get("bytes", 0)),
        saved_at=float(data.get("saved_at", event.time)),
        seconds=data.get("seconds"),
        verified=verified,
    )


def _run_state(attempts: Sequence[Attempt], cancels: Sequence[float], facts: Sequence[Event]) -> tuple[str, str]:
    if attempts:
        return attempts[-1].state, attempts[-1].reason
    if cancels:
        return "cancelled", "cancelled before it started"
    refusals = [str(event.data.get("reason", "")) for event in facts if event.kind == "unstarted"]
    return "created", refusals[-1] if refusals else "not handed to the scheduler yet"
