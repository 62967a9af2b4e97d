"""Parts of a run as values: its attempts, its checkpoints. Times have a zone, paths are absolute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Attempt, Checkpoint


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One start of a run on nodes. Steps are counted as finished."""

    number: int
    """Counted from 1."""
    job_id: str | None
    """Its job; several attempts have the same one if Slurm requeued it."""
    restart: int
    """How often the job had been requeued before."""
    state: str
    """``pending``, ``running``, or how it ended: one of the states of runs."""
    cause: str | None
    """Why it ended, such as ``completed``, ``preempted`` or ``oom``; None: it has not."""
    reason: str
    """What is known about that, as a sentence; may be empty."""
    nodes: tuple[str, ...]
    """Its hosts, in the order of their ranks."""
    submitted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    first_step: int | None
    """The step that it resumed from."""
    last_step: int | None
    """The last step that it finished."""
    lost_steps: int | None
    """How many of its steps were trained again afterwards; None: not known yet."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What its time was spent on, in seconds: ``queue``, ``train``, ``lost`` and others (docs/goodput.md)."""

    @classmethod
    def from_record(cls, attempt: Attempt) -> Self:
        """An ``attempt`` of the record of its run."""
        own = {"job_id": attempt.job_id or None, "nodes": tuple(attempt.nodes), "seconds": dict(attempt.spent)}
        return cls(**{**_values(cls, attempt), **own})


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that is on disk."""

    step: int | None
    """None: its format does not say."""
    path: Path
    bytes: int
    saved_at: datetime | None
    complete: bool
    """Whether a run can resume from it."""
    verified: bool
    """Whether its files were found to be what their manifest says."""
    why: str
    """Why it was saved: ``interval``, ``steps``, ``asked``, ``stop``, ``end``; ``found``: by the user's script."""
    metrics: Mapping[str, float | None]
    """The newest values when it was saved."""
    attempt: int | None
    """The number of the attempt that saved it."""

    @classmethod
    def from_record(cls, checkpoint: Checkpoint, directory: RunDir) -> Self:
        """A ``checkpoint`` of the record of the run in this ``directory``."""
        own = {"path": directory.path / checkpoint.path, "metrics": dict(checkpoint.metrics)}
        return cls(**{**_values(cls, checkpoint), **own})


def moment(seconds: float | None) -> datetime | None:
    """A time given in ``seconds`` since 1970, in UTC; None if no calendar has it."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _values(cls: type[AttemptInfo | CheckpointInfo], record: Attempt | Checkpoint) -> dict[str, Any]:
    """What a record has of the fields of a class that shows it, with times as datetimes."""
    names = [each.name for each in fields(cls) if hasattr(record, each.name)]
    return {name: moment(getattr(record, name)) if name.endswith("_at") else getattr(record, name) for name in names}
