"""Parts of a run as values: its attempts, its checkpoints. Times have a zone, paths are absolute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

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


def moment(seconds: float | None) -> datetime | None:
    """A time given in ``seconds`` since 1970, in UTC; None if no calendar has it."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def attempt_info(attempt: Attempt) -> AttemptInfo:
    """An attempt, as the interface shows it."""
    return AttemptInfo(
        number=attempt.number,
        job_id=attempt.job_id or None,
        restart=attempt.restart,
        state=attempt.state,
        cause=attempt.cause,
        reason=attempt.reason,
        nodes=tuple(attempt.nodes),
        submitted_at=moment(attempt.submitted_at),
        started_at=moment(attempt.started_at),
        ended_at=moment(attempt.ended_at),
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        lost_steps=attempt.lost_steps,
        seconds=dict(attempt.spent),
    )


def checkpoint_info(directory: RunDir, checkpoint: Checkpoint) -> CheckpointInfo:
    """A checkpoint of the run in this ``directory``, as the interface shows it."""
    return CheckpointInfo(
        step=checkpoint.step,
        path=directory.path / checkpoint.path,
        bytes=checkpoint.bytes,
        saved_at=moment(checkpoint.saved_at),
        complete=checkpoint.complete,
        verified=checkpoint.verified,
        why=checkpoint.why,
        metrics=dict(checkpoint.metrics),
        attempt=checkpoint.attempt,
    )
