"""Events that commands write, into ``journal/<writer>.jsonl`` of the run, and into ``nodes/`` of the runs root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from slurmtrain.model.run.events.base import OMIT_NONE, GitRecord, ParentRecord, Payload, ProcessRecord, payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointRecord


# Written before the directory is renamed into place, so that a run has this event from its first moment on.
@payload("created")
class RunCreated(Payload):
    """The run directory is complete."""

    name: str | None = None
    """The run's name in the spec."""
    plan_hash: str | None = None
    """The hash of the resolved plan."""
    executor: str = "local"
    """``slurm`` or ``local``."""
    by: str | None = None
    """Who submitted it: ``user@host``."""
    git: GitRecord | None = None
    """The commit of the working directory, and whether it has changes; None outside a checkout."""
    overrides: Sequence[str] = ()
    """The overrides of the command line, each ``key=value``."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The spec's ``params``."""
    written: Sequence[Sequence[str]] | None = field(default=None, metadata=OMIT_NONE)
    """Numbers in ``params`` that Python would write differently: for each its keys, then its text in the spec."""
    command: str | None = None
    """The spec's ``command``."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """The spec's ``resources``."""
    tracked: bool | None = None
    """Whether its metrics are to be sent to any tracker of the spec's ``tracking``; None: unknown."""
    sweep: str | None = None
    """The id of its sweep, which all runs of one submission share; None for a single run."""
    varies: Mapping[str, Any] = field(default_factory=dict)
    """Its values of the keys of the spec that its sweep varies."""
    parallel: int | None = field(default=None, metadata=OMIT_NONE)
    """How many runs of its sweep may run at once; None: no limit in its spec."""
    pack: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)
    """How runs of its sweep share jobs: ``runs``, how many share one, and ``share_gpu``, whether they share GPUs."""
    trial: int | None = field(default=None, metadata=OMIT_NONE)
    """Its number among the runs of its search, counted from 0; None: it belongs to no search."""
    search: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)
    """What its search is for: ``metric``, ``mode`` (``min`` or ``max``) and ``trials``, how many runs there will be."""
    spec_file: str | None = None
    """The absolute path of the spec file; None if there was none, or it is unknown."""
    parents: Sequence[ParentRecord] | None = field(default=None, metadata=OMIT_NONE)
    """The runs that it comes from; None: there are none."""


# If "submitted" does not follow, the next command looks for the job: the order is in ops/shared/start.py.
@payload("submitting")
class Submitting(Payload):
    """A command is about to hand the run to the scheduler."""

    submission: int = 0
    """Its number, counted from 1."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id if it is known in advance, as for a local job."""
    attempt: int = 0
    """The number of the attempt that it starts."""
    code: str | None = field(default=None, metadata=OMIT_NONE)
    """The hash of the snapshot of the code that it runs; None without one."""
    executor: str = ""
    """``slurm`` or ``local``."""
    host: str | None = None
    """The machine that the command runs on."""
    overrides: Sequence[str] = ()
    """What this submission changes in the spec, each ``key=value``."""
    from_start: bool = False
    """Whether to train from step 0 even if there are checkpoints."""
    by: str = "submit"
    """The command: ``submit``, ``resume``, ``sync``."""
    # Commands decide by this whether to start the run again, and need not read its plan for that.
    requeue: Mapping[str, Any] | None = None
    """The spec's ``requeue``: what happens if the attempt is interrupted. None: nothing."""
    nodes: Sequence[int] | None = field(default=None, metadata=OMIT_NONE)
    """The minimum and maximum number of nodes that it may get."""
    follows: str | None = field(default=None, metadata=OMIT_NONE)
    """The directory of the attempt that it takes over from."""
    without: Sequence[str] | None = field(default=None, metadata=OMIT_NONE)
    """Nodes to exclude, in addition to nodes that the spec excludes."""
    partition: str | None = field(default=None, metadata=OMIT_NONE)
    """The partition that it is submitted to."""
    inherited: Mapping[str, str] | None = field(default=None, metadata=OMIT_NONE)
    """The variables of the submitting shell that count beside the spec: they decide where the job goes, or affect
    ranks."""
    pack: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)
    """How its job is shared: ``runs``, how many share it, and ``share_gpu``, whether they share its GPUs too."""
    # From here on, keys are restated only where overrides may have changed them: fold._newest_settings().
    params: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)
    """The spec's ``params`` from now on, if a ``resume`` may have changed them."""
    written: Sequence[Sequence[str]] | None = field(default=None, metadata=OMIT_NONE)
    """How numbers in these ``params`` were written, likewise."""
    command: str | None = field(default=None, metadata=OMIT_NONE)
    """The spec's ``command`` from now on, likewise."""
    resources: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)
    """The spec's ``resources`` from now on, likewise."""
    tracked: bool | None = field(default=None, metadata=OMIT_NONE)
    """Whether its metrics are to be sent to trackers from now on, likewise."""


@payload("submitted")
class Submitted(Payload):
    """The scheduler accepted the job."""

    submission: int = 0
    """Which submission."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id."""
    process: ProcessRecord | None = field(default=None, metadata=OMIT_NONE)
    """The controller of a local job: ``host``, ``boot``, ``pid``, ``start``."""
    adopted: bool | None = field(default=None, metadata=OMIT_NONE)
    """Whether a later command found the job, because the submitting command was killed."""


@payload("unstarted")
class Unstarted(Payload):
    """The submission failed, so nothing will run."""

    submission: int = 0
    """Which submission."""
    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job's id if it was known in advance."""
    reason: str = ""
    """Why."""


# It names no attempt: whether it is about the newest one follows from its time (outcome.began_at).
@payload("cancel")
class CancelRequested(Payload):
    """A person or a search ends the run early, or ``sync`` ends it because it was idle."""

    reason: str | None = field(default=None, metadata=OMIT_NONE)
    """Why the run is ended, unless a person asked for it."""
    by: str | None = field(default=None, metadata=OMIT_NONE)
    """The key of the spec that is the reason, ``idle_after``; None: a person or a search."""

    @property
    def prunes(self) -> bool:
        """Whether its search ends it."""
        return bool(self.reason) and self.by is None


@payload("upstream_failed")
class UpstreamFailed(Payload):
    """A run that this one starts after will not complete, so the waiting job of this one was ended."""

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job."""
    restart: int = 0
    """Which start of it was the last one known."""
    reason: str = ""
    """Which run, and how it ended."""


@payload("observed")
class JobObserved(Payload):
    """What the scheduler or the machine says about one start of a job."""

    job_id: str | None = field(default=None, metadata=OMIT_NONE)
    """The job; None if only the checkpoints were examined."""
    restart: int = field(default=0)
    """How often the job had been requeued before this start."""
    source: str = ""
    """The source: ``squeue``, ``sacct``, or ``host`` for the machine itself."""
    state: str | None = field(default=None, metadata=OMIT_NONE)
    """Slurm's state; ``ABSENT``: the job is unknown; ``gone``: it has been unknown for too long."""
    reason: str | None = field(default=None, metadata=OMIT_NONE)
    """The reason according to Slurm or the job's log."""
    nodes: str | None = field(default=None, metadata=OMIT_NONE)
    """The nodes, as a Slurm host list."""
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
    # The best estimate of the end of a job whose end nobody reports: outcome._Final.ended_at.
    last_seen: float | None = field(default=None, metadata=OMIT_NONE)
    """When one of its files was last written, in seconds since 1970."""
    # The disk overrules the journals: CheckpointHistory takes published checkpoints that are not listed for deleted.
    checkpoints: Sequence[CheckpointRecord] | None = field(default=None, metadata=OMIT_NONE)
    """The checkpoints that were on disk then."""


@payload("replaced")
class JobReplaced(Payload):
    """A job that Slurm holds indefinitely was ended, to submit another one."""

    job_id: str
    """The job."""
    restart: int = 0
    """Which start of it."""
    why: str = ""
    """Why."""


@payload("asked")
class SaveRequested(Payload):
    """A person requested a checkpoint now."""

    request: str
    """The id of the request; the save that answers it names this id."""
    by: str = ""
    """Who: ``user@host``."""


@payload("mlflow")
class MlflowRunLinked(Payload):
    """The MLflow run that mirrors this run was created."""

    mlflow_run_id: str | None = None
    """Its id in MLflow."""
    uri: str = ""
    """The URI of the tracking store."""


@payload("tags")
class TagsChanged(Payload):
    """A person tagged the run, or removed tags from it."""

    add: Sequence[str] = ()
    """Tags that it gets."""
    remove: Sequence[str] = ()
    """Tags that it loses."""
    by: str = ""
    """Who: ``user@host``."""


@payload("note")
class NoteWritten(Payload):
    """A person wrote a note on the run; it replaces the previous one."""

    text: str = ""
    """The note; empty: none from now on."""
    by: str = ""
    """Who: ``user@host``."""


@payload("archived")
class RunArchived(Payload):
    """A person archived the run, so that lists leave it out, or listed it again."""

    archived: bool = True
    """Whether it is archived from now on."""
    by: str = ""
    """Who: ``user@host``."""


# Comes before the first file is removed, except on a full disk, where space comes first (ops/delete.py).
@payload("delete")
class DeletionRequested(Payload):
    """A person deleted the files of the run. Until ``deleted`` follows, some of them may still be there."""

    bytes: int = 0
    """How much space that frees."""
    by: str = ""
    """Who: ``user@host``."""


# Missing after a kill, or if a file could not be removed: the run can then be deleted once more.
@payload("deleted")
class FilesDeleted(Payload):
    """The files of the run are deleted; its journals, metrics, plans and ``spec.yaml`` stay."""


@payload("forgiven")
class NodeForgiven(Payload):
    """A person forgave preflight findings about a node (in ``nodes/`` of the runs root)."""

    host: str
    """The node."""
    by: str = ""
    """Who: ``user@host``."""
    # Each by name, and not all up to some time: the clocks of two machines may differ.
    findings: Sequence[Sequence[str]] = ()
    """The forgiven findings: for each, the run's id and the name of the attempt's directory."""
