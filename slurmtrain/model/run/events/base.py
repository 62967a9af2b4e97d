"""Events: immutable facts with a time and a writer, stored as lines of journals.

A line is one JSON object: ``{"t": seconds since 1970, "kind": ..., ...}``. For each kind there is a dataclass, whose
fields are the other keys of the object; :mod:`.kinds` lists them all. An :class:`Event` is such a payload with its time
and its location.

Journals outlive versions of this program, and any process may have died while writing one. So reading never raises:
a key unknown to the class goes into :attr:`Payload.extra`, a missing key takes its default, and a value that the field
cannot hold (:mod:`.values`) counts as missing and is reported. If a key without a default is missing, the line is
garbage. What has been read has the declared types: nothing behind this module checks them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar, dataclass_transform

from slurmtrain.model.run.events.event_values import UNUSABLE, Reader, is_plain, is_text, reader_of

T = TypeVar("T")
P = TypeVar("P", bound="Payload")
P_co = TypeVar("P_co", bound="Payload", covariant=True)

# Metadata of a field that is omitted from the line if it is None.
OMIT_NONE: Mapping[str, Any] = {"omit_none": True}


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def payload(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass.

    Comparison and ``repr`` are defined in :class:`Payload`: generating them for each of forty classes would double the
    time to import them, which delays commands such as ``status``.
    """
    return dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)


@payload
class Payload:
    """The content of an event, without its time and location."""

    KIND: ClassVar[str] = ""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the line that this version does not know or cannot read, kept so that no data is lost."""

    @property
    def kind(self) -> str:
        """The kind, as written in journals."""
        return self.KIND

    def to_json(self) -> dict[str, Any]:
        """The keys of the line, except ``t`` and ``kind``."""
        return {**self.known_json(), **self.extra}

    def known_json(self) -> dict[str, Any]:
        """The same without the keys that this version does not know or could not read."""
        record: dict[str, Any] = {}
        for name, key, omit_none, _, _ in layout(type(self)):
            value = getattr(self, name)
            if value is not None or not omit_none:
                record[key] = _as_json(value)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], flaws: list[str] | None = None) -> Self | None:
        """Read the result of :meth:`to_json`, of this version or another.

        Args:
            record: The keys of the line.
            flaws: Receives the keys whose values cannot be used, or not entirely.

        Returns:
            The payload; None if a required field is unusable.
        """
        values: dict[str, Any] = {}
        left_out: list[object] = []
        for name, key, _, is_required, read in layout(cls):
            if key in record:
                value = read(record[key], left_out)
                if left_out or value is UNUSABLE:
                    left_out.clear()
                    if flaws is not None:
                        flaws.append(key)
                if value is not UNUSABLE:
                    values[name] = value
                    continue
            if is_required:
                return None
        if len(values) == len(record):
            return cls(**values)
        keys_read = {each.key for each in layout(cls) if each.name in values}
        extra = {key: item for key, item in record.items() if key not in keys_read and is_text(key) and is_plain(item)}
        return cls(**values, extra=extra)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Payload) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"


@payload
class UnknownEvent(Payload):
    """An event of a kind that only a newer version knows: it is kept, but has no effect."""

    name: str

    @property
    def kind(self) -> str:
        """The kind, as written in journals."""
        return self.name

    def to_json(self) -> dict[str, Any]:
        """The keys of the line, except ``t`` and ``kind``."""
        return dict(self.extra)


@dataclass(frozen=True, slots=True)
class Event(Generic[P_co]):
    """One fact: a payload with its time, in seconds since 1970, and its location.

    ``source`` is the journal's path relative to the run directory, ``offset`` its byte position there.
    """

    time: float
    payload: P_co
    source: str
    offset: int

    @property
    def kind(self) -> str:
        """The kind, as written in journals."""
        return self.payload.kind

    @property
    def order(self) -> tuple[float, str, int]:
        """The sort key of a run's events: the same each time the journals are read."""
        return (self.time, self.source, self.offset)


AnyEvent: TypeAlias = Event[Payload]


def select(events: Iterable[AnyEvent], cls: type[P]) -> list[Event[P]]:
    """The events whose payload is a ``cls``, in the same order."""
    return [event for event in events if isinstance(event.payload, cls)]  # type: ignore[misc]


def encode(time: float, kind: str, record: Mapping[str, Any]) -> bytes:
    """One line of a journal, including its newline.

    ``time`` is in seconds since 1970; ``kind`` and ``record`` are a payload's ``kind`` and ``to_json()``.
    NaN and infinities are written as null.
    """
    line = {"t": round(time, 6), "kind": kind, **record}
    try:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(line), separators=(",", ":"))
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Payload):
        return value.to_json()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return [_as_json(item) for item in value]
    return value


class FieldLayout(NamedTuple):
    """A field of a payload: its ``name``, its ``key`` in journals, and how it is written and read."""

    name: str
    key: str
    omit_none: bool
    is_required: bool
    read: Reader


Layout: TypeAlias = tuple[FieldLayout, ...]
_LAYOUTS: dict[type[Payload], Layout] = {}


def layout(cls: type[Payload]) -> Layout:
    """The fields of a class, except :attr:`Payload.extra`."""
    if cls not in _LAYOUTS:
        _LAYOUTS[cls] = tuple(
            FieldLayout(
                name=each.name,
                key=each.metadata.get("key", each.name),
                omit_none=bool(each.metadata.get("omit_none")),
                is_required=each.default is MISSING and each.default_factory is MISSING,
                read=reader_of(str(each.type)),
            )
            for each in fields(cls)
            if each.name != "extra"
        )
    return _LAYOUTS[cls]
