"""Reading journals: append-only JSON lines with one writer each, which may have died in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.events.event_values import is_text, is_within

if TYPE_CHECKING:
    from slurmtrain.model.run.events.base import AnyEvent

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
    for offset, line in _whole_lines(chunk, start):
        end = offset + len(line) + 1
        if not line.strip():
            continue
        record = _record(line)
        if isinstance(record, str):
            garbage.append(garbage_of(source, offset, line, record))
        else:
            records.append((offset, record))
    return Reading(tuple(records), tuple(garbage), end)


def _whole_lines(chunk: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    while (newline := chunk.find(b"\n", at)) >= 0:
        yield start + at, chunk[at:newline]
        at = newline + 1


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
    if end != len(text) or not isinstance(record, dict):
        return "it is not one JSON object"
    if not is_time(record.get("t")):
        return "it has no time"
    # Counted first, since this is much faster: almost no line has so many.
    if text.count("{") + text.count("[") > _DEEPEST and not is_within(record, _DEEPEST):
        return f"it is nested more than {_DEEPEST} levels deep"
    return record


def is_time(value: object) -> bool:
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
        if flaws or event is None:
            line = json.dumps(record, separators=(",", ":")).encode()
            garbage.append(garbage_of(source, offset, line, _describe_flaws(event, flaws)))
    return events, garbage


def _describe_flaws(event: AnyEvent | None, flaws: list[str]) -> str:
    values = f"unusable: {', '.join(flaws)}" if flaws else "a key is missing"
    return f"it is no event ({values})" if event is None else f"an event {event.kind!r} with values that are {values}"


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
    # Imported late: creating forty classes takes as long as checking the registry when no journal has changed.
    from slurmtrain.model.run.events.base import Event
    from slurmtrain.model.run.events.event_kinds import read_payload

    kind = record.get("kind")
    if not is_text(kind):
        return None
    keys = dict(record)
    del keys["kind"], keys["t"]
    payload = read_payload(str(kind), keys, flaws)
    return None if payload is None else Event(float(record["t"]), payload, source, offset)
