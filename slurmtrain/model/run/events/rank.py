"""Events that ranks write, into ``attempts/*/rank-<r>.jsonl``, or ``rank-<r>.<round>.jsonl`` after restarts in place.

Those about checkpoints stand in :mod:`.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slurmtrain.model.run.events.base import Payload, payload


@payload
class SessionStarted(Payload):
    """The training script has begun its session."""

    KIND: ClassVar[str] = "session"

    step: int = 0
    """Finished steps: 0 before anything is restored."""
    world_size: int = 0
    """How many ranks there are."""
    device: str = ""
    """The rank's device, as torch names it."""


@payload
class StateRegistered(Payload):
    """What a checkpoint consists of was registered."""

    KIND: ClassVar[str] = "registered"

    objects: Sequence[str] = ()
    """The names that the script gave."""


@payload
class TrainingStarted(Payload):
    """The loop over steps has begun."""

    KIND: ClassVar[str] = "total"

    total_steps: int | None = None
    """How many steps make up the whole run."""


@payload
class RankStopped(Payload):
    """The rank leaves, as it was asked to."""

    KIND: ClassVar[str] = "stopped"

    step: int | None = None
    """Finished steps."""


@payload
class ExceptionRaised(Payload):
    """The script has raised an exception."""

    KIND: ClassVar[str] = "raised"

    type: str = ""
    """The name of its class."""
    message: str = ""
    """What it says, secrets taken out."""


RANK_EVENTS: Sequence[type[Payload]] = (
    SessionStarted, StateRegistered, TrainingStarted, RankStopped, ExceptionRaised,
)  # fmt: skip
