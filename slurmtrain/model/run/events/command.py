"""Events that commands write, into ``journal/<writer>.jsonl`` of the run, and into ``nodes/`` of the runs root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from slurmtrain.model.run.events.base import OMIT_NONE, Payload, payload
from slurmtrain.model.run.events.checkpoint import CheckpointRecord
from slurmtrain.model.run.events.records import ProcessRecord


@payload
class RunCreated(Payload):
    """The run directory is complete."""

    KIND: ClassVar[str] = "created"

    name: str | None = None
    """The run's name, as the spec has it."""
    plan_hash: str | None = None
    """The hash of the resolved plan."""
    executor: str = "local"
    """``slurm`` or ``local``."""
    by: str | None = None
    """Who submitted it: ``user@host``."""
    git: Mapping[str, Any] | None = None
    """The commit of the working directory, and whether it was changed; None outside a checkout."""
    overrides: Sequence[str] = ()
    """The overrides of the command line, each ``key=value``."""


@payload
class Submitting(Payload):
    """A command is about to hand the run to the scheduler."""

    KIND: ClassVar[str] = "submitting"

    submission: int = 0
    """Its number, from 1 on."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id where it is known beforehand, as that of a local job is."""
    attempt: int = 0
    """The number of the attempt that it starts."""
    executor: str = ""
    """``slurm`` or ``local``."""
    host: str | None = None
    """The machine on which the command runs."""
    overrides: Sequence[str] = ()
    """What this submission changes in the spec, each ``key=value``."""
    from_start: bool = False
    """Whether it is to train from step 0, whatever checkpoints there are."""
    by: str = "submit"
    """The command: ``submit``, ``resume``, ``sync``."""
    requeue: Mapping[str, Any] | None = None
    """The spec's ``requeue``: what becomes of the attempt when it is interrupted. None: nothing."""
    nodes: Sequence[int] | None = field(default=None, metadata=OMIT_NONE)
    """The least and the largest number of nodes that it may get."""
    follows: str | None = field(default=None, metadata=OMIT_NONE)
    """The directory of the attempt that it takes over from."""
    without: Sequence[str] | None = field(default=None, metadata=OMIT_NONE)
    """Nodes that it is to be started without, beside those that the spec excludes."""
    partition: str | None = field(default=None, metadata=OMIT_NONE)
    """The partition that it goes to."""


@payload
class Submitted(Payload):
    """The scheduler has the job."""

    KIND: ClassVar[str] = "submitted"

    submission: int = 0
    """Which submission."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id."""
    process: ProcessRecord | None = field(default=None, metadata=OMIT_NONE)
    """The controller of a local job: ``host``, ``boot``, ``pid``, ``start``."""
    adopted: bool | None = field(default=None, metadata=OMIT_NONE)
    """Whether a later command found the job of a submission that was killed."""


@payload
class Unstarted(Payload):
    """Handing the run over failed: nothing runs, or will."""

    KIND: ClassVar[str] = "unstarted"

    submission: int = 0
    """Which submission."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id where it was known beforehand."""
    reason: str = ""
    """Why."""


@payload
class CancelRequested(Payload):
    """A person wants the run ended."""

    KIND: ClassVar[str] = "cancel"


@payload
class JobObserved(Payload):
    """What the scheduler, or the machine, says of one start of a job."""

    KIND: ClassVar[str] = "observed"

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job; None where only the checkpoints were looked at."""
    restart: int = field(default=0)
    """How often the job had been put back into the queue before this start."""
    source: str = ""
    """Who says so: ``squeue``, ``sacct``, or ``host`` for the machine itself."""
    state: str | None = field(default=None, metadata=OMIT_NONE)
    """Slurm's state; ``ABSENT``: nobody knows the job; ``gone``: it has had its time to show up again."""
    reason: str | None = field(default=None, metadata=OMIT_NONE)
    """What Slurm, or the job's log, gives as the reason."""
    nodes: str | None = field(default=None, metadata=OMIT_NONE)
    """The nodes, as Slurm writes lists of hosts."""
    started_at: float | None = field(default=None, metadata=OMIT_NONE)
    """When it began, in seconds since 1970."""
    ended_at: float | None = field(default=None, metadata=OMIT_NONE)
    """When it ended, in seconds since 1970."""
    time_limit_s: float | None = field(default=None, metadata=OMIT_NONE)
    """Its time limit, in seconds."""
    exit_code: int | None = field(default=None, metadata=OMIT_NONE)
    """The exit code of the job."""
    signal: int | None = field(default=None, metadata=OMIT_NONE)
    """The signal that ended it."""
    last_seen: float | None = field(default=None, metadata=OMIT_NONE)
    """When any of its files was last written, in seconds since 1970."""
    checkpoints: Sequence[CheckpointRecord] | None = field(default=None, metadata=OMIT_NONE)
    """The checkpoints that were on disk then."""


@payload
class JobReplaced(Payload):
    """A job that Slurm holds for good is ended, to submit another one."""

    KIND: ClassVar[str] = "replaced"

    job_id: str
    """The job."""
    restart: int = 0
    """Which start of it."""
    why: str = ""
    """Why."""


@payload
class SaveRequested(Payload):
    """A person wants a checkpoint now."""

    KIND: ClassVar[str] = "asked"

    request: str
    """The id of the request, which the save that answers it names."""
    by: str = ""
    """Who: ``user@host``."""


@payload
class MlflowRunLinked(Payload):
    """The MLflow run that mirrors this run was made."""

    KIND: ClassVar[str] = "mlflow"

    mlflow_run_id: str | None = None
    """Its id there."""
    uri: str = ""
    """The tracking store."""


@payload
class NodeForgiven(Payload):
    """A person has forgiven what preflights found of a node (in ``nodes/`` of the runs root)."""

    KIND: ClassVar[str] = "forgiven"

    host: str
    """The node."""
    by: str = ""
    """Who: ``user@host``."""
    findings: Sequence[Sequence[str]] = ()
    """What is forgiven: for each finding the run's id and the name of the attempt's directory."""


COMMAND_EVENTS: Sequence[type[Payload]] = (
    RunCreated, Submitting, Submitted, Unstarted, CancelRequested, JobObserved, JobReplaced, SaveRequested,
    MlflowRunLinked, NodeForgiven,
)  # fmt: skip
