"""What is known of one attempt: its events, and a summary of those of its saves, of which there may be thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.run.events.base import AnyEvent, Payload, UnknownEvent
from slurmtrain.model.run.events.checkpoint import (
    CheckpointFound,
    CheckpointPruned,
    CheckpointRecord,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointSaved,
    CheckpointVerified,
    QuotaExceeded,
    SaveFailed,
    SaveIntervalChosen,
)
from slurmtrain.model.run.events.command import SaveRequested
from slurmtrain.model.run.events.rank import StateRegistered
from slurmtrain.model.run.layout import node_of

# Sorts before every event.
NEVER = (0.0, "", -1)
Order = tuple[float, str, int]

# Events that are not kept one by one: what they change is summarised here and in the list of checkpoints.
_SUMMARISED: tuple[type[Payload], ...] = (
    CheckpointSaved, SaveFailed, SaveIntervalChosen, CheckpointPruned, CheckpointRejected, CheckpointVerified,
    CheckpointFound, QuotaExceeded, StateRegistered, SaveRequested, UnknownEvent,
)  # fmt: skip


def is_summarised(event: AnyEvent) -> bool:
    """Whether an event goes into a :class:`SaveLog` alone. Agents write few of these, and their nodes matter."""
    return isinstance(event.payload, _SUMMARISED) and not node_of(event.source)


@dataclass(slots=True)
class SaveLog:
    """The saves of one attempt; the same whatever the order in which their events are added. Times: since 1970."""

    captures: list[tuple[int, float]] = field(default_factory=list)
    """The steps that were saved, or restored, and when their state was taken."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """When training stood still for a save: from and until."""
    stops: list[float] = field(default_factory=list)
    """When training ended to save once more before a stop."""
    first: float | None = None
    """The time of the first event."""
    last: float | None = None
    """The time of the last event."""
    problem: str = ""
    """Why the last save failed; empty if that succeeded."""
    problem_order: Order = NEVER
    interval: Mapping[str, Any] = field(default_factory=dict)
    """How often it saves, as journaled last."""
    interval_order: Order = NEVER

    def add(self, event: AnyEvent) -> None:
        """Take in one event, once."""
        self.first = event.time if self.first is None else min(self.first, event.time)
        self.last = event.time if self.last is None else max(self.last, event.time)
        self.add_save(event)
        payload = event.payload
        if isinstance(payload, CheckpointSaved | SaveFailed) and event.order > self.problem_order:
            failed = isinstance(payload, SaveFailed)
            self.problem_order = event.order
            self.problem = f"the checkpoint of step {payload.step} failed: {payload.reason}" if failed else ""  # type: ignore[union-attr]
        if isinstance(payload, SaveIntervalChosen) and event.order > self.interval_order:
            self.interval, self.interval_order = payload.known_json(), event.order

    def add_save(self, event: AnyEvent) -> None:
        """Take in when a save began and ended, if the event is of one."""
        payload = event.payload
        if isinstance(payload, CheckpointSaved | CheckpointRestored) and payload.step is not None:
            self.captures.append((payload.step, captured_at(payload, event.time)))
        if isinstance(payload, CheckpointSaved):
            since = captured_at(payload, event.time)
            if payload.why == "stop":
                self.stops.append(since)
                return
            # The last save of all holds training up until it is published.
            took = payload.seconds if payload.why == "end" else payload.stall_s
            if took:
                self.stalls.append((since, since + took))

    def with_saves(self, events: Iterable[AnyEvent]) -> SaveLog:
        """A log with the saves and restores of these events too."""
        log = SaveLog([*self.captures], [*self.stalls], [*self.stops], self.first, self.last)
        for event in events:
            log.add_save(event)
        return log

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SaveLog:
        """Read what :meth:`to_dict` gave."""
        log = cls(**record)
        log.captures = [(step, at) for step, at in log.captures]
        log.stalls = [(since, until) for since, until in log.stalls]
        log.problem_order, log.interval_order = _order(log.problem_order), _order(log.interval_order)
        return log


def _order(values: Iterable[Any]) -> Order:
    time, source, offset = values
    return (time, source, offset)


def captured_at(record: CheckpointRecord, time: float) -> float:
    """When the state was taken that a save wrote. ``record`` is of an event at ``time``.

    The save began then, and was journaled when it was over. Times are in seconds since 1970.
    """
    if record.seconds is None:
        return time - (record.stall_s or 0.0)
    return (record.saved_at or time) - record.seconds


@dataclass(slots=True)
class AttemptFacts:
    """The events of an attempt in order, those of commands about it included, and the summary of the others."""

    events: list[AnyEvent] = field(default_factory=list)
    saves: SaveLog = field(default_factory=SaveLog)

    @classmethod
    def from_events(cls, events: Iterable[AnyEvent]) -> AttemptFacts:
        """These events of one attempt, in any order."""
        facts = cls()
        for event in sorted(events, key=lambda event: event.order):
            if is_summarised(event):
                facts.saves.add(event)
            else:
                facts.events.append(event)
        return facts

    @property
    def first(self) -> float:
        """The time of the first event, in seconds since 1970; 0 where there is none."""
        times = [event.time for event in self.events[:1]]
        return min([*times, *([] if self.saves.first is None else [self.saves.first])], default=0.0)

    @property
    def last_written(self) -> float:
        """When its agents and ranks have journaled their last, in seconds since 1970; 0 where they never have."""
        times = [event.time for event in self.events if event.source.startswith("attempts/")]
        return max([*times, *([] if self.saves.last is None else [self.saves.last])], default=0.0)
