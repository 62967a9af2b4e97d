"""Events about checkpoints: mostly of rank 0; those of scripts' own are noted by agents, and some by commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from slurmtrain.model.run.events.base import OMIT_NONE, READERS, UNUSABLE, Payload, list_of, payload


@payload
class CheckpointRecord(Payload):
    """What names a checkpoint, and what is known of its save."""

    step: int | None = None
    """Finished steps; None for one of a script's own whose name does not tell."""
    path: str
    """Where it is: relative to the run directory, or absolute outside it."""
    bytes: int = 0
    """Its size."""
    saved_at: float | None = field(default=None, metadata=OMIT_NONE)
    """When it was published, in seconds since 1970; None: not known."""
    seconds: float | None = field(default=None, metadata=OMIT_NONE)
    """How long the save took."""
    stall_s: float | None = field(default=None, metadata=OMIT_NONE)
    """For how many seconds training stood still for it."""
    why: str | None = field(default=None, metadata=OMIT_NONE)
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``."""
    metrics: Mapping[str, float | None] | None = field(default=None, metadata=OMIT_NONE)
    """The latest values when it was saved; None for one that is no number."""
    attempt: str | None = field(default=None, metadata=OMIT_NONE)
    """The directory of the attempt that saved it."""


def _read_record(value: object) -> Any:
    record = CheckpointRecord.from_json(value) if isinstance(value, dict) else None
    return UNUSABLE if record is None else record


READERS["Sequence[CheckpointRecord]"] = list_of(_read_record, leave_out=True)


@payload
class CheckpointSaved(CheckpointRecord):
    """A checkpoint was published."""

    KIND: ClassVar[str] = "saved"

    request: str | None = None
    """The id of the request that it answers."""


@payload
class SaveFailed(Payload):
    """A save has failed; earlier checkpoints are as they were."""

    KIND: ClassVar[str] = "save_failed"

    step: int | None = None
    """Finished steps."""
    why: str | None = None
    """Why it was to be saved, as of :class:`CheckpointSaved`."""
    reason: str | None = None
    """Why it failed."""
    request: str | None = None
    """The id of the request that it was to answer."""


@payload
class CheckpointRestored(CheckpointRecord):
    """Where training continues from."""

    KIND: ClassVar[str] = "restored"

    world_size: int | None = None
    """The number of ranks that saved it."""
    hashed: bool = True
    """Whether its files were compared with their hashes, or only their sizes."""
    lost_steps: int | None = None
    """How many steps the newest checkpoint was ahead of it."""
    rederived: Sequence[str] = ()
    """The registered objects whose state had to be made anew for another number of ranks."""
    took_s: float = 0.0
    """How long the restore took, in seconds."""


@payload
class CheckpointRejected(Payload):
    """A damaged checkpoint was passed over."""

    KIND: ClassVar[str] = "rejected"

    step: int | None = None
    """Its step."""
    path: str
    """Where it was, relative to the run directory."""
    reason: str | None = None
    """What is wrong with it."""
    aside: str | None = None
    """Where it has been put; None: it could not be moved."""


@payload
class CheckpointVerified(Payload):
    """A command has looked at a checkpoint's files."""

    KIND: ClassVar[str] = "verified"

    path: str
    """Where it is, relative to the run directory."""
    step: int | None = None
    """Its step."""
    reason: str | None = None
    """What is wrong with it; None: nothing."""


@payload
class CheckpointPruned(Payload):
    """A checkpoint was deleted, by rank 0 or by a command."""

    KIND: ClassVar[str] = "pruned"

    path: str
    """Where it was, relative to the run directory."""
    step: int | None = None
    """Its step."""
    why: str | None = None
    """Why."""


@payload
class CheckpointFound(CheckpointRecord):
    """An agent: the newest checkpoint of a script of the user's own."""

    KIND: ClassVar[str] = "found"


@payload
class SaveIntervalChosen(Payload):
    """How often rank 0 saves, and why."""

    KIND: ClassVar[str] = "interval"

    seconds: float | None = None
    """Seconds between the end of one stall and the next save."""
    optimum_s: float | None = None
    """The same before bounds."""
    stall_s: float | None = None
    """What a save stops training for, in seconds; None: not measured."""
    save_s: float | None = None
    """How long a save takes, in seconds; None: not measured."""
    mtbf_s: float | None = None
    """The time between unnoticed interruptions that the job can expect, in seconds."""
    interruptions: int = 0
    """How many were seen that say so."""
    bounded_by: str | None = None
    """The bound that holds: ``shortest``, ``longest``, ``save``, ``overhead``, ``first``; None: none."""
    why: str = ""
    """The same in words."""


@payload
class QuotaExceeded(Payload):
    """What is to be saved goes beyond ``checkpoint.quota``."""

    KIND: ClassVar[str] = "over_quota"

    bytes: int = 0
    """The size of the next checkpoint."""
    taken_bytes: int = field(default=0, metadata={"key": "taken"})
    """The bytes that checkpoints take now."""
    quota: int = 0
    """The bytes that they may take."""


CHECKPOINT_EVENTS: Sequence[type[Payload]] = (
    SaveIntervalChosen, CheckpointSaved, SaveFailed, CheckpointRestored, CheckpointRejected, CheckpointFound,
    CheckpointVerified, CheckpointPruned, QuotaExceeded,
)  # fmt: skip
