"""Numbers and times as people write them in questions: ``1e-3``, ``30m``, ``4GB``, ``2w`` ago, ``2026-11-22T10:00``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from slurmtrain.model.experiment.values import parse_duration, parse_size

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
_LENGTH = re.compile(r"(?=[0-9])(?:(\d{1,9})w)?(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_SECONDS = (7 * 86400, 86400, 3600, 60, 1)
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(\.\d{1,6})?)?)?(Z|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE
)
TIMES = "write 2026-11-22, 2026-11-22T10:30 or how long ago, such as 2w, 3d, 12h or 30m"


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


def read_length(text: str) -> int | None:
    """Seconds from a length of time such as ``2w``, ``90s`` or ``1h30m``; None if it is none."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        return None
    return sum(int(count) * unit for count, unit in zip(match.groups(), _SECONDS, strict=True) if count)


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
        raise ValueError(f"{text!r} is no time of the calendar; {TIMES}") from None


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
