"""The nouns of what is known: a run, its attempts, its checkpoints, and what its job is doing right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.layout import attempt_key

RUN_STATES = ("created", "pending", "running", "requeued", "completed", "failed", "cancelled", "lost")
ENDED = frozenset({"completed", "failed", "cancelled", "lost"})
CAUSES = (
    "completed", "preempted", "timeout", "node_fail", "oom", "crash", "hang", "preflight", "cancelled", "lost",
)  # fmt: skip

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
    network: Mapping[str, Any] = field(default_factory=dict)
    """The networks that it could have trained over, and the elected one, as node 0 has journaled it."""
    clock: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By host: ``offset_ms`` ahead of node 0's, ``bound_ms`` of its error, ``disciplined`` and its ``source``."""
    checks: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By host: ``check``, ``status`` and ``summary`` of each."""
    failures: Sequence[Mapping[str, Any]] = ()
    overrides: Sequence[str] = ()
    from_start: bool = False
    processes: Sequence[Mapping[str, Any]] = ()
    handed_over: bool = False
    submission: int = 0
    """Which submission started it: one job may be started several times."""
    submitted_from: str | None = None
    absent_since: float | None = None
    """Since when the scheduler knows nothing of the job, though nobody said that it ended."""
    confirmed: bool = False
    """Whether nothing that the scheduler could still say would change why it ended."""
    without: Sequence[str] = ()
    """Nodes that it was to be started without, beside those that the spec excludes."""
    excluded: Sequence[str] = ()
    """Nodes that failed its preflight, and that the next start goes without."""
    restarted_by: str | None = None
    """Who starts the run again after its preflight failed: ``slurm``, in whose queue its job may be, or ``sync``."""
    requeue_problem: str = ""
    """Why its agent could not put its job back into the queue."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether the scheduler has nothing more to say of it that matters."""
        return self.ended and self.confirmed and self.restarted_by != "slurm"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What Slurm says of a job right now. ``starts_at``: its estimate, in seconds since 1970, for one that waits."""

    state: str
    code: str = ""
    reason: str = ""
    starts_at: float | None = None
    priority: int | None = None
    nodes: str = ""
