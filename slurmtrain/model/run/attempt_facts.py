"""What is known about one attempt: its events, and a summary of its saves, which may be thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent, UnknownEvent
from slurmtrain.model.run.events.checkpoint_events import (
    CheckpointRecord,
    CheckpointRestored,
    CheckpointSaved,
    SaveFailed,
    SaveIntervalChosen,
)
from slurmtrain.model.run.layout import node_of

# Sorts before every event.
NEVER = (0.0, "", -1)
Order = tuple[float, str, int]


def as_order(values: Iterable[Any]) -> Order:
    """The order of an event, from the ``values`` that JSON has of it."""
    time, source, offset = values
    return (time, source, offset)


# Kinds of events that are not kept individually: their effect is summarised here and in the list of checkpoints.
_SUMMARISED = frozenset(
    {"saved", "save_failed", "interval", "pruned", "rejected", "verified", "found", "over_quota", "registered",
     "finished", "measured", "asked"}
)  # fmt: skip


def is_summarised(event: AnyEvent) -> bool:
    """Whether an event only goes into a :class:`SaveLog`. Events of agents do not: they are few, and nodes matter."""
    is_of_kind = event.kind in _SUMMARISED or isinstance(event.payload, UnknownEvent)
    return is_of_kind and not node_of(event.source)


@dataclass(slots=True)
class SaveLog:
    """The saves of one attempt, independent of the order of added events. Times: seconds since 1970."""

    captures: list[tuple[int, float]] = field(default_factory=list)
    """The steps that were saved or restored, and when their state was captured."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """When saves stalled training: beginning and end of each stall."""
    stops: list[float] = field(default_factory=list)
    """When training ended for a final save before a stop."""
    first: float | None = None
    """The time of the first event."""
    last: float | None = None
    """The time of the last event."""
    problem: str = ""
    """Why the last save failed; empty if it succeeded."""
    problem_order: Order = NEVER
    interval: Mapping[str, Any] = field(default_factory=dict)
    """How often it saves, as last journaled."""
    interval_order: Order = NEVER

    def add(self, event: AnyEvent) -> None:
        """Add an event. Each event must be added only once."""
        self.first = event.time if self.first is None else min(self.first, event.time)
        self.last = event.time if self.last is None else max(self.last, event.time)
        self.add_save(event)
        payload = event.payload
        # Events come in any order: of problems and intervals, the newest counts.
        if isinstance(payload, CheckpointSaved | SaveFailed) and event.order > self.problem_order:
            failed = isinstance(payload, SaveFailed)
            self.problem_order = event.order
            self.problem = f"the checkpoint of step {payload.step} failed: {payload.reason}" if failed else ""  # type: ignore[union-attr]
        if isinstance(payload, SaveIntervalChosen) and event.order > self.interval_order:
            self.interval, self.interval_order = payload.known_json(), event.order

    def add_save(self, event: AnyEvent) -> None:
        """Add the beginning and end of a save, if the event is about one."""
        payload = event.payload
        if isinstance(payload, CheckpointSaved | CheckpointRestored) and payload.step is not None:
            self.captures.append((payload.step, captured_at(payload, event.time)))
        if isinstance(payload, CheckpointSaved):
            since = captured_at(payload, event.time)
            # The whole save counts as stopping, whatever part of it stalled training.
            if payload.why == "stop":
                self.stops.append(since)
                return
            # The save at the end of training stalls it until publication.
            took = payload.seconds if payload.why == "end" else payload.stall_s
            if took:
                self.stalls.append((since, since + took))

    def with_saves(self, events: Iterable[AnyEvent]) -> SaveLog:
        """A copy of the log that also has the saves and restores among these events."""
        # accounting.py, which alone asks for this, needs neither problems nor intervals.
        log = SaveLog([*self.captures], [*self.stalls], [*self.stops], self.first, self.last)
        for event in events:
            log.add_save(event)
        return log

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SaveLog:
        """Read the result of :meth:`to_dict`."""
        log = cls(**record)
        log.captures = [(step, at) for step, at in log.captures]
        log.stalls = [(since, until) for since, until in log.stalls]
        log.problem_order, log.interval_order = as_order(log.problem_order), as_order(log.interval_order)
        return log


def captured_at(record: CheckpointRecord, time: float) -> float:
    """When a save captured the training state, in seconds since 1970. ``record`` belongs to an event at ``time``.

    The save began at the capture, and was journaled when it was finished.
    """
    if record.seconds is None:
        return time - (record.stall_s or 0.0)
    return (record.saved_at or time) - record.seconds


@dataclass(slots=True)
class AttemptFacts:
    """The events of an attempt in order, including events of commands about it, and a summary of its saves."""

    events: list[AnyEvent] = field(default_factory=list)
    saves: SaveLog = field(default_factory=SaveLog)

    @property
    def first(self) -> float:
        """The time of the first event, in seconds since 1970; 0 if there is none."""
        times = [event.time for event in self.events[:1]]
        return min([*times, *([] if self.saves.first is None else [self.saves.first])], default=0.0)

    @property
    def last_written(self) -> float:
        """When its agents and ranks last journaled something, in seconds since 1970; 0 if they never did."""
        # Commands may journal something about an attempt long after its end.
        times = [event.time for event in self.events if event.source.startswith("attempts/")]
        return max([*times, *([] if self.saves.last is None else [self.saves.last])], default=0.0)
