"""What trackers have of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.registry import schema
from slurmtrain.registry.rows import RowFormat


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of a run a tracker has."""

    tracker: str
    """The tracker's name."""
    uri: str
    """Where it keeps runs."""
    remote_id: str | None = None
    """Its id of the run; None: unknown."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """How far each metrics file was sent, in bytes."""
    step: int | None = None
    """The largest step of the surviving line that was sent."""
    sending: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the place up to which it was sent; empty for what versions before 8 have sent."""
    revision: int = -1
    """The run's revision when everything that could be sent had been sent."""
    refused: Sequence[str] = field(default_factory=list)
    """The names of metrics that it does not take."""
    problem: str = ""
    """Why nothing can be sent; empty if that went well the last time."""
    since: float | None = None
    """Since when there has been a problem, in seconds since 1970."""


SENT = RowFormat(schema.sent, Sent, "run_id")
