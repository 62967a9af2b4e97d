"""Events of the process that reads a script's metrics, into ``attempts/*/script.jsonl``.

After restarts in place it is ``script.<round>.jsonl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

from slurmtrain.model.run.events.base import OMIT_NONE, Payload, payload


@payload
class ScriptProgressed(Payload):
    """How far the script has come by its output: the first step of a round, and the last one."""

    KIND: ClassVar[str] = "script_steps"

    step: int | None = field(default=None, metadata=OMIT_NONE)
    """The step before the first one that was read, which the ranks have resumed from, as far as is known."""
    last_step: int | None = field(default=None, metadata=OMIT_NONE)
    """The last step that was read, when the ranks have ended."""
    total_steps: int | None = None
    """The number of steps in the whole run, if the output or the spec says."""


@payload
class ScriptUnread(Payload):
    """No metrics are read from the script's output any more."""

    KIND: ClassVar[str] = "script_unread"

    why: str = ""
    """Why, as a sentence without a full stop."""


SCRIPT_EVENTS: Sequence[type[Payload]] = (ScriptProgressed, ScriptUnread)
