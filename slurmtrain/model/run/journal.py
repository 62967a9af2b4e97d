"""Reading journals: append-only JSON lines with one writer each, which may have died in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.model.run.events.base import AnyEvent

_END_OF_TIME = 1e12
_BLANK = " \t\r\n"
# json.loads() first detects the encoding and skips blanks, which doubles the time to parse a line of metrics.
_read_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Garbage:
    """A line that is not a valid record: it stays in its journal and is reported."""

    source: str
    offset: int
    line: bytes


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
    for offset, line in _whole_lines(chunk, start):
        end = offset + len(line) + 1
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            garbage.append(Garbage(source, offset, line))
        else:
            records.append((offset, record))
    return Reading(tuple(records), tuple(garbage), end)


def _whole_lines(chunk: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    while (newline := chunk.find(b"\n", at)) >= 0:
        yield start + at, chunk[at:newline]
        at = newline + 1


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        text = line.decode().strip(_BLANK)
        record, end = _read_json(text)
    except (ValueError, RecursionError):
        return None
    if end != len(text):
        return None
    return record if isinstance(record, dict) and _is_time(record.get("t")) else None


def _is_time(value: object) -> bool:
    # Python's JSON parser accepts NaN, and integers too large for a float; neither can be used for sorting.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _END_OF_TIME


def events_of(reading: Reading, source: str) -> tuple[list[AnyEvent], list[Garbage]]:
    """The events in a ``reading`` of the journal ``source``, and its garbage, such as lines without a kind."""
    events: list[AnyEvent] = []
    garbage = list(reading.garbage)
    for offset, record in reading.records:
        event = read_event(record, source, offset)
        if event is None:
            garbage.append(Garbage(source, offset, json.dumps(record).encode()))
        else:
            events.append(event)
    return events, garbage


def read_event(record: Mapping[str, Any], source: str, offset: int) -> AnyEvent | None:
    """The event of a ``record`` with a time, at this ``offset`` of the journal ``source``; None for garbage."""
    # Imported late: creating forty classes takes as long as checking the registry when no journal has changed.
    from slurmtrain.model.run.events.base import Event, is_text
    from slurmtrain.model.run.events.kinds import read_payload

    kind = record.get("kind")
    if not is_text(kind):
        return None
    payload = read_payload(str(kind), {key: value for key, value in record.items() if key not in ("kind", "t")})
    return None if payload is None else Event(float(record["t"]), payload, source, offset)
