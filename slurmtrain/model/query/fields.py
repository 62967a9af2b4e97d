"""Fields of a run by the names that they have in the JSON: ``state``, ``params.lr``, ``metrics.val_loss``.

Also the fields that differ among runs, such as the parameters of a sweep, how a person would have written their values,
and the order of runs by them: ``-metrics.val_loss,submitted_at``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from slurmtrain.errors import QueryError
from slurmtrain.model.experiment.kinds import WrittenNumber
from slurmtrain.model.experiment.values import parse_duration, parse_size, read_length

# A run as the JSON has it. Fields may be computed when they are read.
Record = Mapping[str, Any]

ABSENT: Final = object()
# Fields whose values are ISO times, apart from all whose names end in "_at".
_TIMES = frozenset({"pending.estimated_start"})
# What a script or a spec names itself, whatever it calls it.
_NAMED_BY_USERS = ("params.", "metrics.")


def value_of(record: Record, name: str) -> Any:
    """The value of a field; None if the record has no such field."""
    value = look_up(record, name)
    return None if value is ABSENT else value


def look_up(record: Record, name: str) -> Any:
    """The value of a field; :data:`ABSENT` if the record has no such field. A name's dots may be part of a key."""
    # The longest key wins: a metric may be called val.loss.
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record[head] if dot and head in record else None
    return look_up(inner, rest) if isinstance(inner, Mapping) else ABSENT


def text_of(value: Any) -> str:
    """A value as the JSON has it, text without its quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def is_time(name: str) -> bool:
    """Whether the values of this field are times."""
    return name in _TIMES or (name.endswith("_at") and not name.startswith(_NAMED_BY_USERS))


def flattened(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of all fields that are no mappings themselves; ``prefix`` precedes the names."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def names_in(records: Iterable[Record]) -> list[str]:
    """The names of all fields that are no mappings themselves, by first appearance."""
    return list(dict.fromkeys(name for record in records for name, _ in flattened(record)))


_EXPONENT = re.compile(r"e([+-]?)0*([0-9]+)$")
# A number with more figures was computed, and is shown with so many.
_MOST_FIGURES, _FIGURES = 12, 6


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that differ among runs: first differing values, then settings that some runs lack.

    Args:
        settings: The settings of each run, such as its parameters. A setting in a mapping is named ``section.name``.
    """
    return list(differing_values(settings))


def differing_values(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The different values of the settings that differ among runs, by their names, as :func:`differing` has these.

    Args:
        settings: The settings of each run.
    """
    values: dict[str, dict[Any, Any]] = {}
    counts: dict[str, int] = {}
    for of_run in settings:
        for name, value in flattened(of_run):
            values.setdefault(name, {}).setdefault(identity(value), value)
            counts[name] = counts.get(name, 0) + 1
    lacking = [name for name, different in values.items() if len(different) == 1 and counts[name] < len(settings)]
    varying = [name for name, different in values.items() if len(different) > 1]
    return {name: list(values[name].values()) for name in (*varying, *lacking)}


def shared_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all of several runs have, with the same values; for a single run, all of its settings.

    Args:
        settings: The settings of each run, such as its parameters.
    """
    varying = set(differing(settings))
    return {name: value for name, value in flattened(settings[0] if settings else {}) if name not in varying}


def identity(value: Any) -> Any:
    """Something hashable that is equal for equal values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def repetition_key(settings: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """The same for runs that have the same values of the settings with these ``names``, hashable."""
    flat = dict(flattened(settings))
    return tuple(identity(flat[name]) if name in flat else None for name in names)


def write_settings(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    """``lr=0.1 batch_size=64``: the settings with these names, without missing ones."""
    flat = dict(flattened(settings))
    values = ((name, flat.get(name, ABSENT)) for name in names)
    return " ".join(f"{name}={write_value(value)}" for name, value in values if value is not ABSENT)


def write_value(value: Any) -> str:
    """A value as people write it: text as it is, numbers as they were written, if that is known, else JSON.

    Numbers that were computed, such as 0.10999999999999999, are rounded to six figures.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, WrittenNumber):
        return str(value)
    if isinstance(value, float):
        # Nobody writes so many figures.
        chosen = float(f"{value:.{_MOST_FIGURES}g}") == value
        return _short_exponent(f"{value:.{_MOST_FIGURES if chosen else _FIGURES}g}")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_inside(each)}" for key, each in value.items()) + "}"
    return f"[{', '.join(map(_inside, value))}]" if isinstance(value, list | tuple) else json.dumps(value)


def write_measured(value: float) -> str:
    """A measured number as people write it: to four figures, below a million without an exponent."""
    if 1000 <= abs(value) < 1_000_000:
        return f"{value:.0f}"
    return _short_exponent(f"{value:.4g}")


def _short_exponent(text: str) -> str:
    return _EXPONENT.sub(lambda match: f"e{match[1].removeprefix('+')}{match[2]}", text)


def _inside(value: Any) -> str:
    """A value in a list or a mapping, where text has quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else write_value(value)


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class SortKey:
    """A field to sort by."""

    name: str
    descending: bool = False

    def __str__(self) -> str:
        return f"-{self.name}" if self.descending else self.name


def read_sort(text: str) -> tuple[SortKey, ...]:
    """The fields of a text; a minus before a field means descending. Raises QueryError if a field is missing."""
    keys = []
    for part in map(str.strip, text.split(",")):
        name = part.removeprefix("-").strip()
        if not name:
            raise QueryError(f"{text!r} is not an order; write fields such as metrics.val_loss or -submitted_at")
        keys.append(SortKey(name, part.startswith("-")))
    return tuple(keys)


def in_order(records: Sequence[R], keys: Sequence[SortKey]) -> list[R]:
    """Records in this order; equal ones stay as they are.

    Numbers come before text, and what has no value last, in either direction. Texts count as numbers if all are.

    Args:
        records: The runs.
        keys: The fields, the most important first.
    """
    ordered = list(records)
    # Sorting is stable, so the least important field comes first.
    for key in reversed(keys):
        values = [_sortable(value_of(record, key.name)) for record in ordered]
        # Numbers among texts would stand in two orders: texts count as numbers only if all of them are.
        read = {value: number_of(value) for value in values if isinstance(value, str)}
        if None not in read.values():
            values = [read[value] if isinstance(value, str) else value for value in values]
        numbers = [(value, place) for place, value in enumerate(values) if isinstance(value, int | float)]
        texts = [(value, place) for place, value in enumerate(values) if isinstance(value, str)]
        numbers.sort(key=lambda pair: pair[0], reverse=key.descending)
        texts.sort(key=lambda pair: pair[0], reverse=key.descending)
        missing = [record for record, value in zip(ordered, values, strict=True) if value is None]
        ordered = [*(ordered[place] for _, place in [*numbers, *texts]), *missing]
    return ordered


def _sortable(value: Any) -> float | str | None:
    """A number, a text, or None for what has no value, or several."""
    if isinstance(value, list | tuple):
        return " ".join(map(text_of, value)) or None
    if value is None or value == "" or isinstance(value, dict):
        return None
    return number_of(value) if isinstance(value, int | float) and not isinstance(value, bool) else text_of(value)


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# So many digits still fit into a float, and int() refuses very long texts.
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(\.\d{1,6})?)?)?(Z|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE
)
TIMES = "write 2026-11-22, 2026-11-22T10:30 or how long ago, such as 2w, 3d, 12h or 30m"


# The same few texts are read again for each of very many runs.
@lru_cache(maxsize=4096)
def read_number(text: str) -> float | None:
    """The number that a text stands for: plain, a time in seconds, or a size in bytes; None if it is none of these."""
    if _NUMBER.fullmatch(text):
        number = int(text) if _WHOLE.fullmatch(text) else float(text)
        return number if abs(number) < math.inf else None
    if (seconds := read_length(text)) is not None:
        return seconds
    for parse in (parse_duration, parse_size):
        try:
            return parse(text)
        except ValueError:
            continue
    return None


def number_of(value: Any) -> float | None:
    """The number that a value of a run stands for, also if it is written as text; None if it is not a finite one."""
    if isinstance(value, str):
        return read_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Span:
    """The moments that a text such as ``2026-11-22`` stands for: ``begin`` up to ``end``, in seconds since 1970."""

    begin: float
    end: float


def read_span(text: str, now: float) -> Span:
    """A day, a minute, a second or a moment, from ISO 8601 in local time unless it has a zone, or from an age.

    Args:
        text: What a person wrote.
        now: What ages count back from, in seconds since 1970.

    Raises:
        ValueError: It is not a time.
    """
    # An age is a moment, and no day that begins and ends.
    if (age := read_length(text)) is not None:
        return Span(now - age, now - age)
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; {TIMES}")
    _, minutes, seconds, fraction, _ = match.groups()
    length = timedelta(days=1) if minutes is None else timedelta(minutes=1)
    if seconds is not None:
        length = timedelta(seconds=1) if fraction is None else timedelta(0)
    try:
        begin = datetime.fromisoformat(text.upper())
        return Span(begin.timestamp(), (begin + length).timestamp())
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} does not exist in the calendar; {TIMES}") from None


def moment_of(value: Any) -> float | None:
    """Seconds since 1970 of an ISO time in a run; None if it is none."""
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def iso(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond; None for one that no calendar has."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def _within(at: float, span: Span) -> bool:
    # The begin counts by itself, since the span of a moment is empty.
    return at == span.begin or span.begin < at < span.end


# Whether a moment stands in a relation to a span.
SPAN_RELATIONS: Mapping[str, Callable[[float, Span], bool]] = {
    "=": _within,
    "!=": lambda at, span: not _within(at, span),
    "<": lambda at, span: at < span.begin,
    "<=": lambda at, span: at < span.begin or _within(at, span),
    ">": lambda at, span: at > span.begin and not _within(at, span),
    ">=": lambda at, span: at >= span.begin,
}
