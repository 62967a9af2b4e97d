"""Events: immutable facts with a time and a writer, as lines of journals.

A line is one JSON object: ``{"t": seconds since 1970, "kind": ..., ...}``. For each kind there is a dataclass, whose
fields are the other keys of the object; :mod:`.kinds` lists them all. An :class:`Event` is such a payload with its time
and its place.

Journals outlive versions of this program, and any process may have died while it wrote one. So reading never raises:
a key that a class does not have is kept aside (:attr:`Payload.extra`), a missing one has its default, and a value of
the wrong type, or one that neither JSON nor SQLite can hold, counts as missing. Where that leaves a field without a
value that has no default, there is no payload: the line is garbage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")
P = TypeVar("P", bound="Payload")
P_co = TypeVar("P_co", bound="Payload", covariant=True)

# Metadata of a field that is not written while it is None.
OMIT_NONE: Mapping[str, Any] = {"omit_none": True}
# What SQLite can keep as an INTEGER.
_LARGEST = 2**63 - 1


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def payload(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a payload.

    Comparison and ``repr`` stand in :class:`Payload`: making them for each of forty classes would double what it takes
    to import them, which commands such as ``status`` wait for.
    """
    return dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)


@payload
class Payload:
    """What an event says, its time and place apart."""

    KIND: ClassVar[str] = ""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the line that this version does not know, or cannot read, so that nothing of a journal is lost."""

    @property
    def kind(self) -> str:
        """The kind as it stands in journals."""
        return self.KIND

    def to_json(self) -> dict[str, Any]:
        """The keys of the line, but for ``t`` and ``kind``."""
        return {**self.known_json(), **self.extra}

    def known_json(self) -> dict[str, Any]:
        """The same without what this version does not know, or could not read."""
        record: dict[str, Any] = {}
        for name, key, omit_none, _, _ in layout(type(self)):
            value = getattr(self, name)
            if value is not None or not omit_none:
                record[key] = _as_json(value)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self | None:
        """Read what :meth:`to_json` gave, by this version or another; None where a required field is unusable."""
        values: dict[str, Any] = {}
        extra = dict(record)
        for name, key, _, is_required, read in layout(cls):
            if key in record:
                value = read(record[key])
                if value is not UNUSABLE:
                    values[name] = value
                    del extra[key]
                    continue
            if is_required:
                return None
        return cls(**values, extra=extra) if extra else cls(**values)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Payload) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"


@payload
class UnknownEvent(Payload):
    """An event of a kind that only a newer version knows: it is kept, and decides nothing."""

    name: str

    @property
    def kind(self) -> str:
        """The kind as it stands in journals."""
        return self.name

    def to_json(self) -> dict[str, Any]:
        """The keys of the line, but for ``t`` and ``kind``."""
        return dict(self.extra)


@dataclass(frozen=True, slots=True)
class Event(Generic[P_co]):
    """One fact: a payload with its time, in seconds since 1970, and its place.

    ``source`` is the journal's path relative to the run directory, ``offset`` its byte position there.
    """

    time: float
    payload: P_co
    source: str
    offset: int

    @property
    def kind(self) -> str:
        """The kind as it stands in journals."""
        return self.payload.kind

    @property
    def order(self) -> tuple[float, str, int]:
        """Events of one run sort by this: the same on every rebuild."""
        return (self.time, self.source, self.offset)


AnyEvent: TypeAlias = Event[Payload]


def select(events: Iterable[AnyEvent], cls: type[P]) -> list[Event[P]]:
    """Those of the events whose payload is a ``cls``, in the same order."""
    return [event for event in events if isinstance(event.payload, cls)]  # type: ignore[misc]


def encode(time: float, kind: str, record: Mapping[str, Any]) -> bytes:
    """One line of a journal, its newline included.

    ``time`` is in seconds since 1970, ``kind`` and ``record`` are as a payload's ``kind`` and ``to_json`` have them.
    NaN and infinities are written as JSON's null.
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
    if isinstance(value, Payload):
        return value.to_json()
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return [_as_json(item) for item in value]
    return value


# --- reading values ---------------------------------------------------------------------------------------------------

UNUSABLE = object()
"""What a reader of values returns for one that it cannot take."""
Reader = Callable[[object], Any]


def is_text(value: object) -> bool:
    """Whether this is text that can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_whole(value: object) -> bool:
    """Whether this is a whole number that SQLite can keep."""
    return type(value) is int and -_LARGEST <= value <= _LARGEST


def is_number(value: object) -> bool:
    """Whether this is a finite number: Python's reader of JSON takes NaN and infinities, too."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _plain(is_usable: Callable[[object], bool]) -> Reader:
    return lambda value: value if is_usable(value) else UNUSABLE


def _or_none(read: Reader) -> Reader:
    """A reader that takes null as well."""
    return lambda value: None if value is None else read(value)


def list_of(read: Reader, *, leave_out: bool = False) -> Reader:
    """A reader of lists of what ``read`` takes; ``leave_out``: without what it does not take."""

    def read_list(value: object) -> Any:
        if not isinstance(value, list | tuple):
            return UNUSABLE
        items = tuple(read(item) for item in value)
        usable = tuple(item for item in items if item is not UNUSABLE)
        return usable if leave_out or len(usable) == len(items) else UNUSABLE

    return read_list


def values_of(read: Reader) -> Reader:
    """A reader of objects whose values ``read`` takes."""

    def read_mapping(value: object) -> Any:
        if not isinstance(value, dict):
            return UNUSABLE
        items = {key: read(item) for key, item in value.items()}
        return UNUSABLE if any(item is UNUSABLE for item in items.values()) else items

    return read_mapping


# By the annotation of a field: evaluating annotations would take longer than everything else here.
READERS: dict[str, Reader] = {
    "str": _plain(is_text),
    "int": _plain(is_whole),
    "float": _plain(is_number),
    "bool": _plain(_is_flag),
    "Mapping[str, Any]": _plain(_is_mapping),
    "Mapping[str, Mapping[str, Any]]": values_of(_plain(_is_mapping)),
    "Mapping[str, float | None]": values_of(_or_none(_plain(is_number))),
    "Sequence[str]": list_of(_plain(is_text)),
    "Sequence[int]": list_of(_plain(is_whole)),
    "Sequence[Sequence[str]]": list_of(list_of(_plain(is_text))),
    "Sequence[Mapping[str, Any]]": list_of(_plain(_is_mapping)),
}


def reader_of(annotation: str) -> Reader:
    """The reader of values of a field with this annotation. Raises KeyError for a type that has none."""
    bare = annotation.removesuffix(" | None")
    return READERS[bare] if bare == annotation else _or_none(READERS[bare])


class FieldLayout(NamedTuple):
    """A field of a payload: its ``name`` and its ``key`` in journals, and how it is written and read."""

    name: str
    key: str
    omit_none: bool
    is_required: bool
    read: Reader


Layout: TypeAlias = tuple[FieldLayout, ...]
_LAYOUTS: dict[type[Payload], Layout] = {}


def layout(cls: type[Payload]) -> Layout:
    """The fields of a class, :attr:`Payload.extra` apart."""
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
