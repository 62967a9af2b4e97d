"""Events as read from journals, for tests of their readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slurmtrain.model.interruption.policy import with_next_start
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import fold
from slurmtrain.model.run.journal_lines import Progress, read_event
from slurmtrain.model.run.run import Run


def event(time: float, kind: str, record: Mapping[str, Any], source: str, offset: int) -> AnyEvent:
    """The event from a line with these keys; ``time`` is in seconds since 1970."""
    read = read_event({"t": time, "kind": kind, **record}, source, offset)
    assert read is not None, (kind, record)
    return read


def read_run(run_id: str, events: Iterable[AnyEvent], progress: Mapping[str, Progress]) -> Run:
    """The run as commands see it; ``progress`` is keyed by attempt."""
    return with_next_start(fold(run_id, events, progress))
