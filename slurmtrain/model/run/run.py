"""The data model: a run, its attempts, its checkpoints, and what its job is doing right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.layout import attempt_key

# The state of a run whose journals cannot be read: whatever else is known of it may no longer be so.
UNREADABLE = "unreadable"
RUN_STATES = ("created", "pending", "running", "requeued", "completed", "failed", "cancelled", "lost", UNREADABLE)
ENDED = frozenset({"completed", "failed", "cancelled", "lost"})
CAUSES = (
    "completed", "preempted", "timeout", "node_fail", "oom", "crash", "hang", "preflight", "cancelled", "lost",
    "early", "upstream",
)  # fmt: skip
# Why ranks are stopped when more nodes have joined. It is no cause of an end: the attempt goes on after it.
GROW = "grow"
# Where the evidence of an attempt says that its ranks train apart.
APART = "apart"

# How the paths of slurmtrain's own checkpoints begin, relative to the run directory.
PUBLISHED = "checkpoints/step-"

FROM_LOG = "log"
"""The step of a checkpoint that does not tell it: the one that was logged last when it was saved."""

NO_COLUMN: Mapping[str, Any] = {"stored": False}
"""The metadata of fields that the registry does not keep in a record's own row; it has a column for each other one."""

# The state of a run whose last attempt ended with this cause, unless it is started again.
STATE_OF_CAUSE = {"completed": "completed", "cancelled": "cancelled", "lost": "lost"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk, or was. ``path`` is relative to the run directory, or absolute outside it.

    ``seconds``: how long its save took; ``stall_s``: for how many seconds it stalled training; None: unknown.
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
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``; ``found``: by the user's script."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The latest values when it was saved."""
    attempt: int | None = None
    """The number of the attempt that saved it."""
    pruned_at: float | None = None
    """When it was deleted, in seconds since 1970; None: it is on disk."""
    verified_at: float | None = None
    """When its files were last verified, whatever the result."""
    format: str | None = None
    """The format of a checkpoint that a user's script saved; None: slurmtrain's own, or unknown."""
    step_from: str | None = None
    """``log``: its step was not in the checkpoint, but logged last when it was saved; None: it was, or is unknown."""

    @property
    def on_disk(self) -> bool:
        """Whether it has not been deleted."""
        return self.pruned_at is None

    @property
    def published(self) -> bool:
        """Whether it is one of slurmtrain's own checkpoints, complete and not moved aside."""
        return self.complete and self.path.startswith(PUBLISHED)

    @property
    def order(self) -> tuple[int, float, str]:
        """Checkpoints of one run sort by this: the oldest step first."""
        # One without a step comes first, so that it is never the newest beside others.
        return (self.step if self.step is not None else -1, self.saved_at, self.path)


@dataclass(frozen=True, kw_only=True)
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
    """The networks that it could have trained over, and the elected one, as journaled by node 0."""
    clock: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By host: ``offset_ms`` ahead of node 0's clock, its error ``bound_ms``, ``disciplined``, and its ``source``."""
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
    """Since when the scheduler has not known the job, although nothing says that it ended."""
    confirmed: bool = False
    """Whether its cause is final, whatever the scheduler may still report."""
    without: Sequence[str] = ()
    """Nodes excluded from its start, in addition to nodes that the spec excludes."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """The variables of the shell that submitted it which count beside the spec, by name."""
    executor: str = ""
    partition: str = ""
    """The partition that it was submitted to, or several, separated by commas; empty: none, or unknown."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """The partition that each node is in, by the node's number, where its agent knows."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """The spec's ``resources`` in it."""
    asked_by: str = "submit"
    """The command that started it: ``sync`` for an automatic restart."""
    pack: int = 1
    """How many runs share its job."""
    share_gpu: bool = False
    """Whether these runs share the job's GPUs too."""
    policy: Mapping[str, Any] | None = None
    """The spec's ``requeue`` as plain data: what happens if it is interrupted. None: nothing."""
    excluded: Sequence[str] = ()
    """Nodes that its agent excluded from the next start."""
    restarted_by: str | None = None
    """What starts the run again: ``slurm``, whose queue may hold its job, or ``sync``; None: nothing."""
    again_at: float | None = None
    """The earliest time at which it may start again, in seconds since 1970."""
    requeue_problem: str = ""
    """Why its agent could not requeue its job."""
    interval: Mapping[str, Any] = field(default_factory=dict)
    """How often it saves, what a save costs, and the reason for the interval, as last journaled by rank 0."""
    shares: Sequence[Mapping[str, Any]] = ()
    """Each time its ranks chose how many samples of a batch each gets: ``at``, ``step``, ``shares``, ``fixed_s``,
    ``sample_s``, ``step_s``, ``before_s``."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """What its ranks compute on, if that decides how: ``names`` and ``precisions``, by rank; ``backend``,
    ``backend_why``."""
    save_problem: str = ""
    """Why its last save failed; empty if it succeeded."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """Each restart of its ranks inside the allocation: ``at``, ``round``, ``cause``, ``why``, ``past``."""
    last_word: bool = False
    """Whether any of its agents has journaled how it ended."""
    round_step: int | None = None
    """The step that its ranks resumed from when they were last started."""
    began_from: str | None = None
    """The fingerprint of the script's own checkpoint that its ranks resumed from when they were last started."""
    left: str | None = None
    """The fingerprint of the newest of the script's own checkpoints when it was last looked for."""
    passed_over: Sequence[Mapping[str, Any]] = ()
    """Checkpoints that its ranks did not resume from, though they were newer: ``at``, ``path``, ``step``, ``why``."""
    hangs: Sequence[Mapping[str, Any]] = ()
    """What the ranks were doing when no step had been finished for too long."""
    raised_limits: Sequence[Mapping[str, Any]] = ()
    """Each time its ranks got longer for a step, because ranks that others waited for computed: ``at``, ``limit_s``,
    ``raised_s``, ``ranks``, ``why``."""
    stragglers: Sequence[Mapping[str, Any]] = ()
    """Ranks that were slower than the others for a long time."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Further observations of its agents: memory, GPUs, Slurm's answer when a signal came."""
    spent: Mapping[str, float] = field(default_factory=dict, metadata=NO_COLUMN)
    """Seconds by kind of use, up to its end or the last time known about it (:mod:`.accounting`)."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether nothing that the scheduler may still report matters for it."""
        # A job that Slurm may still have in its queue can start again.
        return self.ended and self.confirmed and self.restarted_by != "slurm"

    @property
    def nodes(self) -> list[str]:
        """Its hosts, in the order of their ranks."""
        # The keys are text, as in JSON: by that order, 10 would come before 2.
        return [self.hosts[node] for node in sorted(self.hosts, key=int)]

    @property
    def key(self) -> str:
        """The name of the attempt's directory."""
        return attempt_key(self.job_id, self.restart)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known about a run."""

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
    metrics_from: str | None = None
    """``output``: step and metrics were guessed from the script's output, and decide nothing; None: it reports them."""
    lost_steps: int | None = None
    mlflow_run_id: str | None = None
    git: Mapping[str, Any] | None = None
    attempts: Sequence[Attempt] = field(default=(), metadata=NO_COLUMN)
    checkpoints: Sequence[Checkpoint] = field(default=(), metadata=NO_COLUMN)
    """All checkpoints that were ever saved or found, including deleted ones, by step."""
    cancelled: bool = False
    """Whether a person cancelled the newest attempt."""
    end_reason: str = field(default="", metadata=NO_COLUMN)
    """Why its search cancelled it; empty if it did not. In the registry it is the ``reason``."""
    save_problem: str = ""
    """Why the newest attempt's last save failed; empty if it succeeded."""
    goodput: float | None = None
    """The share, 0 to 1, of its time on nodes that went into training that was kept; None if it has had no nodes."""

    job_over: bool = field(default=False, metadata=NO_COLUMN)
    """Whether the newest attempt's job is over: it ended without being requeued, or was replaced."""
    given_up: str = field(default="", metadata=NO_COLUMN)
    """Why no command starts the run again after its newest attempt; empty if one may."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The spec's ``params`` in its newest attempt, whose numbers remember how they were written."""
    written: Sequence[Sequence[str]] = ()
    """How they were written, for JSON, which only has numbers (:func:`~.experiment.kinds.texts_as_json`)."""
    command: str | None = None
    """The spec's ``command`` in its newest attempt; None: unknown."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """The spec's ``resources`` in its newest attempt."""
    tracked: bool | None = None
    """Whether its metrics are to be sent to any tracker; None: unknown."""
    sweep: str | None = None
    """The id of its sweep, which the runs of one submission share; None for a single run."""
    parents: Sequence[Mapping[str, Any]] = ()
    """The runs that it comes from, each as :class:`.lineage.Parent` writes it."""
    tags: Sequence[str] = ()
    """What people have tagged it with, in alphabetical order."""
    note: str = ""
    """What a person has noted on it."""
    archived: bool = False
    """Whether lists leave it out."""
    deleted_at: float | None = None
    """When the deletion of its files was requested, in seconds since 1970; None: it was not."""
    freed: int | None = None
    """How many bytes the deletion freed; None: it was not requested, or is not complete."""

    @property
    def ended(self) -> bool:
        """Whether it is over, and nothing starts it again."""
        return self.state in ENDED

    @property
    def unreadable(self) -> bool:
        """Whether its journals cannot be read, so that nothing may be done on the ground of what is known about it."""
        return self.state == UNREADABLE

    @property
    def idle(self) -> bool:
        """Whether it has no job: it has ended, or waits for a command to start it again."""
        return self.ended or (self.newest is not None and self.newest.restarted_by == "sync")

    @property
    def on_disk(self) -> Sequence[Checkpoint]:
        """The checkpoints that have not been deleted, including damaged ones."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.on_disk]

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that the run can resume from; None if there is none."""
        return next((one for one in reversed(self.checkpoints) if one.on_disk and one.complete), None)

    @property
    def newest(self) -> Attempt | None:
        """The attempt that started last; None before the first."""
        return self.attempts[-1] if self.attempts else None


if TYPE_CHECKING:
    # Type checkers know what fields dataclasses.replace() takes.
    from dataclasses import replace as replace
else:

    def replace(record: Checkpoint | Attempt | Run, **changes: Any) -> Any:
        """The record with new values for the fields in ``changes``.

        Takes a tenth of the time of ``dataclasses.replace``, since records have no slots: some fifty fields are copied
        for each event of an attempt.
        """
        # Without __init__, which would look at every field.
        copy = object.__new__(type(record))
        vars(copy).update(vars(record), **changes)
        return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What Slurm says about a job right now. ``starts_at``: its estimate for a pending job, in seconds since 1970."""

    state: str
    code: str = ""
    reason: str = ""
    starts_at: float | None = None
    priority: int | None = None
    nodes: str = ""


# A finding of the preflight by run, directory of the attempt, and host.
FindingKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A node that failed the preflight of an attempt.

    Attributes:
        host: The node's name.
        run_id: The run.
        attempt_key: The name of the attempt's directory.
        attempt: The attempt's number.
        checks: The checks that failed.
        reason: How they failed.
        evidence: The measurements, by check.
        seen_at: Seconds since 1970.
    """

    host: str
    run_id: str
    attempt_key: str
    attempt: int
    checks: Sequence[str]
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    seen_at: float

    @property
    def key(self) -> FindingKey:
        """What pardons refer to."""
        return (self.run_id, self.attempt_key, self.host)
