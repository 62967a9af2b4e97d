"""Events as journals give them, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal import read_event


def event(time: float, kind: str, record: Mapping[str, Any], source: str, offset: int) -> AnyEvent:
    """The event of a line with these keys; ``time`` is in seconds since 1970."""
    read = read_event({"t": time, "kind": kind, **record}, source, offset)
    assert read is not None, (kind, record)
    return read
