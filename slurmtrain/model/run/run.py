"""The nouns of what is known: a run, its attempts, its checkpoints, and what its job is doing right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.layout import attempt_key

RUN_STATES = ("created", "pending", "running", "requeued", "completed", "failed", "cancelled", "lost")
ENDED = frozenset({"completed", "failed", "cancelled", "lost"})
CAUSES = (
    "completed", "preempted", "timeout", "node_fail", "oom", "crash", "hang", "preflight", "cancelled", "lost",
)  # fmt: skip

# How the paths of checkpoints of our own kind begin, relative to the run directory.
PUBLISHED = "checkpoints/step-"

# What an attempt that ended for this cause makes of its run, as long as nobody starts it again.
STATE_OF_CAUSE = {"completed": "completed", "cancelled": "cancelled", "lost": "lost"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on disk, or was. ``path`` is relative to the run directory, or absolute outside it.

    ``seconds`` is how long its save took, ``stall_s`` how long training stood still for it; None: nobody knows.
    """

    step: int | None
    path: str
    bytes: int
    saved_at: float
    seconds: float | None
    complete: bool = True
    verified: bool = False
    stall_s: float | None = None
    why: str = ""
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``; ``found``: by a script of the user's."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The latest values when it was saved."""
    attempt: int | None = None
    """The number of the attempt that saved it."""
    pruned_at: float | None = None
    """When it was deleted, in seconds since 1970; None: it is on disk."""
    verified_at: float | None = None
    """When its files were last looked at, good or not."""

    @property
    def on_disk(self) -> bool:
        """Whether it was not deleted."""
        return self.pruned_at is None

    @property
    def published(self) -> bool:
        """Whether it is one of our own kind, at its own place: whole, and not set aside."""
        return self.complete and self.path.startswith(PUBLISHED)

    @property
    def order(self) -> tuple[int, float, str]:
        """Checkpoints of one run sort by this: the oldest step first."""
        return (self.step if self.step is not None else -1, self.saved_at, self.path)


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
    """Since when the scheduler knows nothing of the job, though nothing says that it ended."""
    confirmed: bool = False
    """Whether nothing that the scheduler could still say would change why it ended."""
    without: Sequence[str] = ()
    """Nodes that it was to be started without, beside those that the spec excludes."""
    executor: str = ""
    asked_by: str = "submit"
    """The command that has started it: ``sync`` for a restart that nobody asked for."""
    policy: Mapping[str, Any] | None = None
    """What becomes of it when it is interrupted: the spec's ``requeue``, as plain data. None: nothing."""
    excluded: Sequence[str] = ()
    """Nodes that the next start goes without, as its agent has decided."""
    restarted_by: str | None = None
    """Who starts the run again: ``slurm``, in whose queue its job may be, or ``sync``; None: nobody."""
    again_at: float | None = None
    """Before when it is not to start again, in seconds since 1970."""
    requeue_problem: str = ""
    """Why its agent could not put its job back into the queue."""
    interval: Mapping[str, Any] = field(default_factory=dict)
    """How often it saves, what of a save costs what, and why, as rank 0 has journaled it last."""
    save_problem: str = ""
    """Why its last save failed; empty if that succeeded."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """Each time its ranks were started again inside the allocation: ``at``, ``round``, ``cause``, ``why``, ``past``."""
    last_word: bool = False
    """Whether any of its agents has journaled how it ended."""
    round_step: int | None = None
    """The step that its ranks have gone on from, when they were last started."""
    hangs: Sequence[Mapping[str, Any]] = ()
    """What was seen of ranks that had finished no step for too long."""
    stragglers: Sequence[Mapping[str, Any]] = ()
    """Ranks that were slower than the others for long."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the node with the reason knows beside it: memory, GPUs, Slurm's word when the signal came."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on, up to its end or the last that is known of it (:mod:`.accounting`)."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether the scheduler has nothing more to say of it that matters."""
        return self.ended and self.confirmed and self.restarted_by != "slurm"

    @property
    def key(self) -> str:
        """The name of the attempt's directory."""
        return attempt_key(self.job_id, self.restart)


_ATTEMPT_FIELDS = tuple(each.name for each in fields(Attempt))
_ATTEMPT_SLOTS = {name: getattr(Attempt, name) for name in _ATTEMPT_FIELDS}
_attempt_values = attrgetter(*_ATTEMPT_FIELDS)

if TYPE_CHECKING:
    # Type checkers know what fields dataclasses.replace() takes.
    from dataclasses import replace as replace
else:

    def replace(attempt: Attempt, **changes: Any) -> Attempt:
        """The attempt with other values of the fields that ``changes`` names.

        It is ``dataclasses.replace`` in a third of its time: 45 fields are copied for each event of an attempt, which
        took half of the time in which a run was built from its events.
        """
        copy = object.__new__(Attempt)
        for slot, value in zip(_ATTEMPT_SLOTS.values(), _attempt_values(attempt), strict=True):
            slot.__set__(copy, value)
        for name, value in changes.items():
            _ATTEMPT_SLOTS[name].__set__(copy, value)
        return copy


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
    """All that were ever saved or found, the deleted ones included, by step."""
    cancelled: bool = False
    """Whether a person asked to end the newest attempt."""
    save_problem: str = ""
    """Why the newest attempt's last save failed; empty if that succeeded."""
    goodput: float | None = None
    """The share, 0 to 1, of its time on nodes in which it trained what it kept; None while it was on none."""

    job_over: bool = False
    """Whether the newest attempt's job is over: it ended without being put back into the queue, or was replaced."""
    given_up: str = ""
    """Why no command starts the run again after its newest attempt; empty where one may."""

    @property
    def ended(self) -> bool:
        """Whether it is over, and nothing starts it again."""
        return self.state in ENDED

    @property
    def idle(self) -> bool:
        """Whether no job of it is left: it has ended, or waits for a command to start it again."""
        return self.ended or (self.newest is not None and self.newest.restarted_by == "sync")

    @property
    def on_disk(self) -> Sequence[Checkpoint]:
        """The checkpoints that were not deleted, damaged ones included."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.on_disk]

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one that a run can resume from."""
        return next((one for one in reversed(self.checkpoints) if one.on_disk and one.complete), None)

    @property
    def newest(self) -> Attempt | None:
        """The attempt that began last; None before the first."""
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
