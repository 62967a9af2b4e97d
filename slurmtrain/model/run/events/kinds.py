"""All kinds of events, and how to read one from a journal's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.model.run.events.agent import AGENT_EVENTS
from slurmtrain.model.run.events.base import Payload, UnknownEvent
from slurmtrain.model.run.events.checkpoint import CHECKPOINT_EVENTS
from slurmtrain.model.run.events.command import COMMAND_EVENTS
from slurmtrain.model.run.events.rank import RANK_EVENTS

KINDS: Mapping[str, type[Payload]] = {
    cls.KIND: cls for group in (COMMAND_EVENTS, AGENT_EVENTS, RANK_EVENTS, CHECKPOINT_EVENTS) for cls in group
}


def read_payload(kind: str, record: Mapping[str, Any]) -> Payload | None:
    """The payload of this ``kind`` from the keys of its line (``record``); None if it cannot be read.

    An unknown kind is read as an :class:`UnknownEvent`.
    """
    cls = KINDS.get(kind)
    return cls.from_json(record) if cls is not None else UnknownEvent(name=kind, extra=dict(record))
