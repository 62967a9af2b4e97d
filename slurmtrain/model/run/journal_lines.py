"""Reading journals and metrics: append-only JSON lines with one writer each, which may have died within a line.

A line of ``metrics.jsonl`` is ``{"t": seconds since 1970, "step": finished steps, "metrics": {name: number}}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from slurmtrain.model.run.events.base import (
    KINDS,
    AnyEvent,
    Event,
    Payload,
    UnknownEvent,
    is_plain,
    is_text,
    is_whole,
    is_within,
)

# The year 3999: no clock is that wrong, and every calendar goes further.
_END_OF_TIME = 64_060_588_800
# Lists and objects inside each other: journals have a handful, and Python's parser fails at about a thousand.
_DEEPEST = 64
# Keep this much of a line that is garbage, in bytes.
_KEPT_BYTES = 1024
_BLANK = " \t\r\n"
# json.loads() first detects the encoding and skips blanks, which doubles the time to parse a line of metrics.
_read_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Garbage:
    """A line that is not a valid record, or only in part: it stays in its journal and is reported.

    ``offset``: where it begins, in bytes. ``line``: its beginning. ``why``: what is wrong with it.
    """

    source: str
    offset: int
    line: bytes
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of a section of a journal. ``end`` is the offset after the last complete line."""

    records: tuple[tuple[int, dict[str, Any]], ...]
    garbage: tuple[Garbage, ...]
    end: int


def read_lines(chunk: bytes, start: int, source: str) -> Reading:
    """The records in ``chunk``, which begins at byte ``start`` of ``source``.

    A last line without a newline is left for the next reading: its writer may still be writing it, or has died.
    """
    records, garbage = [], []
    end = start
    while (newline := chunk.find(b"\n", end - start)) >= 0:
        offset, line = end, chunk[end - start : newline]
        end = start + newline + 1
        if not line.strip():
            continue
        record = _record(line)
        if isinstance(record, str):
            garbage.append(garbage_of(source, offset, line, record))
        else:
            records.append((offset, record))
    return Reading(tuple(records), tuple(garbage), end)


def garbage_of(source: str, offset: int, line: bytes, why: str) -> Garbage:
    """The ``line`` of a file as garbage; only its beginning is kept.

    ``source`` is the file, ``offset`` where the line begins in it, and ``why`` what is wrong.
    """
    return Garbage(source, offset, line[:_KEPT_BYTES], why)


def _record(line: bytes) -> dict[str, Any] | str:
    """The record of a line, or why it is none."""
    try:
        text = line.decode().strip(_BLANK)
        record, end = _read_json(text)
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except (ValueError, RecursionError):
        return "it is not JSON"
    # A torn line that was continued by another writer is two objects in one line.
    if end != len(text) or not isinstance(record, dict):
        return "it is not one JSON object"
    if not is_timestamp(record.get("t")):
        return "it has no time"
    # Counted first, since this is much faster: almost no line has so many.
    if text.count("{") + text.count("[") > _DEEPEST and not is_within(record, _DEEPEST):
        return f"it is nested more than {_DEEPEST} levels deep"
    return record


def is_timestamp(value: object) -> bool:
    """Whether this is a number of seconds since 1970 that a clock can show."""
    # Python's JSON parser accepts NaN, and integers too large for a float; neither can be used for sorting.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _END_OF_TIME


def events_of(reading: Reading, source: str) -> tuple[list[AnyEvent], list[Garbage]]:
    """The events in a ``reading`` of the journal ``source``, and its garbage.

    Garbage are lines that are no events, and lines of events with unusable values.
    """
    events: list[AnyEvent] = []
    garbage = list(reading.garbage)
    for offset, record in reading.records:
        flaws: list[str] = []
        event = read_event(record, source, offset, flaws)
        if event is not None:
            events.append(event)
        # What can be read of a line counts; the line is reported all the same, so that nobody misses the rest.
        if flaws or event is None:
            line = json.dumps(record, separators=(",", ":")).encode()
            values = f"unusable: {', '.join(flaws)}" if flaws else "a key is missing"
            why = f"an event {event.kind!r} whose values are {values}" if event else f"it is not an event ({values})"
            garbage.append(garbage_of(source, offset, line, why))
    return events, garbage


def read_event(record: Mapping[str, Any], source: str, offset: int, flaws: list[str] | None = None) -> AnyEvent | None:
    """The event of a record.

    Args:
        record: The record, with a time.
        source: The journal.
        offset: Where it is in the journal, in bytes.
        flaws: Receives the keys whose values cannot be used.

    Returns:
        The event; None for garbage.
    """
    kind = record.get("kind")
    if not is_text(kind):
        return None
    keys = dict(record)
    del keys["kind"], keys["t"]
    cls = payload_classes().get(str(kind))
    payload: Payload | None
    if cls is not None:
        payload = cls.from_json(keys, flaws)
    else:
        extra = {key: value for key, value in keys.items() if is_text(key) and is_plain(value)}
        payload = UnknownEvent(name=str(kind), extra=extra)
    return None if payload is None else Event(float(record["t"]), payload, source, offset)


@cache
def payload_classes() -> Mapping[str, type[Payload]]:
    """The class of each kind of event."""
    # Imported late: creating so many classes takes as long as checking the registry when no journal has changed.
    from slurmtrain.model.run.events import agent_events, checkpoint_events, command_events, rank_events

    # Importing the modules has filled KINDS; their names are not needed.
    del agent_events, checkpoint_events, command_events, rank_events
    return KINDS


_FLOATS = frozenset({float})


class Point(NamedTuple):
    """A line: the number of finished steps, the time in seconds since 1970, and what was logged. Values may be NaN."""

    step: int
    time: float
    metrics: Mapping[str, float]


def read_point(record: Mapping[str, Any], flaws: list[str] | None = None) -> Point | None:
    """The point of a line's ``record``, which has a time; None if it has no step.

    ``flaws`` receives what cannot be used: ``step``, or names of metrics.
    """
    step, metrics = record.get("step"), record.get("metrics") or {}
    if not is_whole(step):
        if flaws is not None:
            flaws.append("step")
        return None
    if not isinstance(metrics, dict):
        usable, unusable = {}, ["metrics"]
    # One comparison for all values, since this is done for each step of each run.
    elif _FLOATS.issuperset(map(type, metrics.values())) and all(map(str.isascii, metrics)):
        return Point(step, float(record["t"]), metrics)  # type: ignore[arg-type]
    else:
        usable = {
            name: value
            for name, value in metrics.items()
            if is_text(name) and (type(value) is float or is_whole(value))
        }
        unusable = [name.encode(errors="replace").decode() for name in metrics if name not in usable]
    if flaws is not None:
        flaws += unusable
    return Point(step, float(record["t"]), usable)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress after the lines read so far; reading the same lines in several parts gives the same result."""

    last_step: int | None = None
    last_time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def advance(self, points: Iterable[Point]) -> Progress:
        """The progress after these further points."""
        step, time, metrics = self.last_step, self.last_time, dict(self.metrics)
        for point in points:
            step, time = point.step, point.time
            metrics.update(point.metrics)
        return Progress(step, time, metrics)


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points among these records, in the same order."""
    return [point for record in records if (point := read_point(record)) is not None]


def steps_per_second(points: Sequence[Point]) -> float | None:
    """Steps per second over these points of one attempt; None if they are too few."""
    if len(points) < 2 or points[-1].time <= points[0].time:
        return None
    return float(points[-1].step - points[0].step) / (points[-1].time - points[0].time)
