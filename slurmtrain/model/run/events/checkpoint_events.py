"""Events about checkpoints: mostly from rank 0, some from commands; from agents for a script's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from slurmtrain.model.run.events.base import OMIT_NONE, READERS, UNUSABLE, Payload, list_of, payload


@payload()
class CheckpointRecord(Payload):
    """A checkpoint's identity, and what is known about its save."""

    step: int | None = None
    """Finished steps; None for a script's own checkpoint whose name does not contain the step."""
    path: str
    """Where it is: relative to the run directory, or absolute outside it."""
    bytes: int = 0
    """Its size."""
    # Identifies the checkpoint, together with the path: a run that starts over saves to the same paths.
    saved_at: float | None = field(default=None, metadata=OMIT_NONE)
    """When it was published, in seconds since 1970; None: unknown."""
    seconds: float | None = field(default=None, metadata=OMIT_NONE)
    """How long the save took, in seconds."""
    stall_s: float | None = field(default=None, metadata=OMIT_NONE)
    """How long it stalled training, in seconds."""
    why: str | None = field(default=None, metadata=OMIT_NONE)
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``."""
    metrics: Mapping[str, float | None] | None = field(default=None, metadata=OMIT_NONE)
    """The latest values when it was saved; None for a value that is not a number."""
    attempt: str | None = field(default=None, metadata=OMIT_NONE)
    """The directory of the attempt that saved it."""


def _read_record(value: object, left_out: list[object]) -> Any:
    flaws: list[str] = []
    record = CheckpointRecord.from_json(value, flaws) if isinstance(value, dict) else None
    left_out += flaws
    return UNUSABLE if record is None else record


# One unusable record must not hide all other checkpoints of an observation.
READERS["Sequence[CheckpointRecord]"] = list_of(_read_record, leave_out=True)


@payload("saved")
class CheckpointSaved(CheckpointRecord):
    """A checkpoint was published."""

    request: str | None = None
    """The id of the request that it answers."""


@payload("save_failed")
class SaveFailed(Payload):
    """A save failed; earlier checkpoints are unaffected."""

    step: int | None = None
    """Finished steps."""
    why: str | None = None
    """Why it was to be saved, as in ``saved``."""
    reason: str | None = None
    """Why it failed."""
    request: str | None = None
    """The id of the request that it was to answer."""


@payload("restored")
class CheckpointRestored(CheckpointRecord):
    """The checkpoint that training continues from."""

    world_size: int | None = None
    """The number of ranks that saved it."""
    hashed: bool = True
    """Whether its files were checked against their hashes; otherwise only their sizes were."""
    lost_steps: int | None = None
    """How many steps the newest checkpoint was ahead of it."""
    rederived: Sequence[str] = ()
    """The registered objects whose state had to be derived again for a different number of ranks."""
    took_s: float = 0.0
    """How long the restore took, in seconds."""


# No CheckpointRecord: the checkpoint is another run's, and must not be listed among the checkpoints of this one.
@payload("weights")
class WeightsLoaded(Payload):
    """Training begins at step 0 with the weights of another run's checkpoint."""

    path: str = ""
    """The path of the checkpoint, relative to the run directory."""
    step: int | None = None
    """The step at which the other run had saved it."""
    took_s: float = 0.0
    """How long loading took, in seconds."""


@payload("rejected")
class CheckpointRejected(Payload):
    """A damaged checkpoint was skipped."""

    step: int | None = None
    """Its step."""
    path: str
    """Where it was, relative to the run directory."""
    reason: str | None = None
    """What is wrong with it."""
    # One that could not be moved stays at its path, and counts as damaged all the same.
    aside: str | None = None
    """Where it was moved; None: it could not be moved."""


@payload("verified")
class CheckpointVerified(Payload):
    """A command verified a checkpoint's files."""

    path: str
    """Where it is, relative to the run directory."""
    step: int | None = None
    """Its step."""
    reason: str | None = None
    """What is wrong with it; None: nothing."""


@payload("pruned")
class CheckpointPruned(Payload):
    """A checkpoint was deleted, by rank 0 or by a command."""

    path: str
    """Where it was, relative to the run directory."""
    step: int | None = None
    """Its step."""
    why: str | None = None
    """Why."""


@payload("found")
class CheckpointFound(CheckpointRecord):
    """From an agent: the newest checkpoint of a user script that saves its own.

    Before ranks start, it is the one that they continue from; after they have ended, the one that they left.
    """

    format: str | None = field(default=None, metadata=OMIT_NONE)
    """The name of its format, as in ``checkpoint.format``, or ``other``."""
    # Tells progress where the step cannot: checkpoints of scripts may have none (policy.PriorEnd).
    fingerprint: str | None = field(default=None, metadata=OMIT_NONE)
    """Its identity by its content; None: it could not be read."""
    step_from: str | None = field(default=None, metadata=OMIT_NONE)
    """``log``: the checkpoint does not tell its step, which is the one logged last when it was saved."""


@payload("passed_over")
class CheckpointPassedOver(Payload):
    """From an agent: the ranks that it is about to start continue from an older checkpoint than this one."""

    path: str
    """Where it is."""
    step: int | None = None
    """Its step."""
    fingerprint: str | None = None
    """Its identity by its content."""
    why: str = ""
    """Why."""


@payload("interval")
class SaveIntervalChosen(Payload):
    """How often rank 0 saves, and why."""

    seconds: float | None = None
    """Seconds between the end of one stall and the next save."""
    optimum_s: float | None = None
    """The same before bounds are applied."""
    stall_s: float | None = None
    """How long a save stalls training, in seconds; None: not measured."""
    save_s: float | None = None
    """How long a save takes, in seconds; None: not measured."""
    mtbf_s: float | None = None
    """The expected time between interruptions without notice, in seconds."""
    interruptions: int = 0
    """The number of interruptions that this estimate is based on."""
    bounded_by: str | None = None
    """The bound that applies: ``shortest``, ``longest``, ``save``, ``overhead``, ``first``; None: none."""
    why: str = ""
    """The same in words."""


@payload("over_quota")
class QuotaExceeded(Payload):
    """The next checkpoint would exceed ``checkpoint.quota``."""

    bytes: int = 0
    """The size of the next checkpoint."""
    taken_bytes: int = field(default=0, metadata={"key": "taken"})
    """The bytes that checkpoints occupy now."""
    quota: int = 0
    """The bytes that they may occupy."""
