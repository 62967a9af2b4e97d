"""All kinds of events, and how to read one from a journal's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.model.run.events.agent_events import AGENT_EVENTS
from slurmtrain.model.run.events.base import Payload, UnknownEvent
from slurmtrain.model.run.events.checkpoint_events import CHECKPOINT_EVENTS
from slurmtrain.model.run.events.command_events import COMMAND_EVENTS
from slurmtrain.model.run.events.event_values import is_plain, is_text
from slurmtrain.model.run.events.rank_events import RANK_EVENTS, SCRIPT_EVENTS

KINDS: Mapping[str, type[Payload]] = {
    cls.KIND: cls
    for group in (COMMAND_EVENTS, AGENT_EVENTS, RANK_EVENTS, SCRIPT_EVENTS, CHECKPOINT_EVENTS)
    for cls in group
}


def read_payload(kind: str, record: Mapping[str, Any], flaws: list[str] | None = None) -> Payload | None:
    """The payload of this ``kind`` from the keys of its line (``record``); None if it cannot be read.

    An unknown kind is read as an :class:`UnknownEvent`. ``flaws`` receives the keys whose values cannot be used.
    """
    cls = KINDS.get(kind)
    if cls is not None:
        return cls.from_json(record, flaws)
    return UnknownEvent(
        name=kind, extra={key: value for key, value in record.items() if is_text(key) and is_plain(value)}
    )
