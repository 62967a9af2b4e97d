"""Events: immutable facts with a time and a writer, stored as lines of journals.

A line is one JSON object: ``{"t": seconds since 1970, "kind": ..., ...}``. For each kind there is a dataclass, whose
fields are the other keys of the object. An :class:`Event` is such a payload with its time
and its location.

Journals outlive versions of this program, and any process may have died while writing one. So reading never raises:
a key unknown to the class goes into :attr:`Payload.extra`, a missing key takes its default, and a value that the field
cannot hold counts as missing and is reported. If a key without a default is missing, the line is
garbage. What has been read has the declared types: nothing behind this module checks them again.

Any JSON may be in a file, and Python's parser accepts even more: NaN, infinities, integers of thousands of digits, text
that UTF-8 cannot encode. What a reader lets through can be stored in SQLite, written as JSON, printed and calculated
with. Records inside events are plain JSON mappings, which are read like events: a value of the wrong type counts as
missing and is reported, unknown keys are kept, and a record without a required key is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar, dataclass_transform

UNUSABLE = object()
"""What a reader returns for a value that it does not accept."""
Reader: TypeAlias = Callable[[object, list[object]], Any]
"""Returns the usable part of a value, else :data:`UNUSABLE`; appends the omitted parts of a list or object."""

# No count, size, time or duration is larger; sums of a thousand such integers still fit into SQLite's INTEGER.
_LARGEST = 2**53
_LARGEST_INTEGER = 2**63 - 1
# What nests deeper is not ours, and would exceed the recursion limit of what reads it later.
_DEEPEST = 32
# So many digits fit into 32 bits.
_MOST_DIGITS = 9


def is_text(value: object) -> bool:
    """Whether this is text that can be encoded as UTF-8: JSON may contain lone surrogates."""
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
    """Whether this is an integer, of a size that something counted can have."""
    return type(value) is int and -_LARGEST <= value <= _LARGEST


def is_number(value: object) -> bool:
    """Whether this is a finite number, of a size that something measured can have."""
    return is_whole(value) or (isinstance(value, float) and -_LARGEST <= value <= _LARGEST)


def is_metric(value: object) -> bool:
    """Whether this is a number of any size that a float can have; NaN and infinities are not numbers."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """Whether this is JSON of any kind, nested at most ``depth`` levels, that can be stored, printed and sent."""
    if isinstance(value, str):
        return is_text(value)
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int):
        return -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    if depth <= 0:
        return False
    if isinstance(value, dict):
        return all(is_text(key) and is_plain(item, depth - 1) for key, item in value.items())
    return isinstance(value, list | tuple) and all(is_plain(item, depth - 1) for item in value)


def is_within(value: object, depth: int) -> bool:
    """Whether lists and objects are nested at most ``depth`` levels deep."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not items or (depth > 0 and all(is_within(item, depth - 1) for item in items))


def is_index(key: object) -> bool:
    """Whether this text is a number such as a rank's, in digits."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS


def plain(is_usable: Callable[[object], bool]) -> Reader:
    """A reader of the values that ``is_usable`` accepts, all or nothing."""
    return lambda value, _: value if is_usable(value) else UNUSABLE


def or_none(read: Reader) -> Reader:
    """A reader that also accepts null."""
    return lambda value, left_out: None if value is None else read(value, left_out)


def list_of(read: Reader, *, leave_out: bool = False) -> Reader:
    """A reader of lists whose items ``read`` accepts; ``leave_out``: without the items that it does not accept."""

    def read_list(value: object, left_out: list[object]) -> Any:
        if not isinstance(value, list | tuple):
            return UNUSABLE
        items = tuple(read(item, left_out) for item in value)
        usable = tuple(item for item in items if item is not UNUSABLE)
        if len(usable) == len(items):
            return items
        left_out.append(value)
        return usable if leave_out else UNUSABLE

    return read_list


def values_of(read: Reader, is_key: Callable[[object], bool] = is_text) -> Reader:
    """A reader of objects whose keys ``is_key`` accepts, and whose values ``read`` accepts."""

    def read_mapping(value: object, left_out: list[object]) -> Any:
        if not isinstance(value, dict) or not all(map(is_key, value)):
            return UNUSABLE
        items = {key: read(item, left_out) for key, item in value.items()}
        return UNUSABLE if any(item is UNUSABLE for item in items.values()) else items

    return read_mapping


# By a field's annotation as text: evaluating annotations would take longer than everything else here.
READERS: dict[str, Reader] = {
    "str": plain(is_text),
    "int": plain(is_whole),
    "float": plain(is_number),
    "bool": plain(lambda value: isinstance(value, bool)),
    "Any": plain(is_plain),
    "Mapping[str, Any]": plain(lambda value: isinstance(value, dict) and is_plain(value)),
    "Mapping[str, int]": values_of(plain(is_whole)),
    "Mapping[str, str]": values_of(plain(is_text)),
    "Mapping[str, float | None]": values_of(or_none(plain(is_metric))),
    "Sequence[str]": list_of(plain(is_text)),
    "Sequence[int]": list_of(plain(is_whole)),
    "Sequence[float]": list_of(plain(is_number)),
    "Sequence[Sequence[str]]": list_of(list_of(plain(is_text))),
}


def reader_of_type(annotation: str) -> Reader:
    """The reader for a field with this annotation. Raises KeyError for a type without a reader."""
    bare = annotation.removesuffix(" | None")
    return READERS[bare] if bare == annotation else or_none(READERS[bare])


ProcessRecord: TypeAlias = Mapping[str, Any]
"""A process: ``host``, ``boot`` (the machine's boot id), ``pid``, and ``start`` (in clock ticks since boot)."""
FailureRecord: TypeAlias = Mapping[str, Any]
"""A rank that failed: ``rank``, ``pid``, ``exit_code`` or ``signal``, ``at`` (seconds since 1970), ``error``,
``last_lines`` of its log. If the run's command starts the ranks itself, ``node`` is its node, and ``rank`` is None
where it is the command that failed."""
FindingRecord: TypeAlias = Mapping[str, Any]
"""What a check found: ``check``, ``status``, ``summary`` and, if there is any, ``evidence``."""
RankRecord: TypeAlias = Mapping[str, Any]
"""A rank of a hanging run: ``rank``, ``node``, ``step``, ``phase``, ``idle_s`` (seconds), ``state``, ``stack``, ``cpu``
(cores)."""
GitRecord: TypeAlias = Mapping[str, Any]
"""A revision: ``commit``, whether files differ from it (``dirty``) and how many (``modified``), and the ``branch``, if
one is checked out."""
NetworkRecord: TypeAlias = Mapping[str, Any]
"""A network that ranks could train over: ``name``, ``family``, ``interfaces`` and ``addresses`` by host, ``kind``,
``speed_mbps``, ``mtu``, ``measured_mb_per_s``, ``pinned``, ``proved``, ``problems``."""
AddressRecord: TypeAlias = Mapping[str, Any]
"""An address that no rank could train over: ``host``, ``interface``, ``address``, ``why``."""
EvidenceRecord: TypeAlias = Mapping[str, Any]
"""What an agent saw besides the ranks: ``oom_kills``, ``memory_limit`` (bytes), ``xids`` (``code``, ``bus``, ``times``,
``line``), ``gone`` (nodes), ``slurm`` (its answer)."""
ParentRecord: TypeAlias = Mapping[str, Any]
"""A run that another one comes from: its id ``run``, the ``relation``, and the ``step`` of a checkpoint."""
RoundRecord: TypeAlias = Mapping[str, Any]
"""The end of a round of ranks: ``cause``, ``began_at_step``, ``committed`` (step), ``reached`` (step), ``where``,
``foreign``, ``began_from`` (fingerprint), ``left`` (fingerprint)."""


# For each record: its required and its optional keys, with the types of their values as annotations.
RECORD_KEYS: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "ProcessRecord": ({"host": "str", "boot": "str", "pid": "int", "start": "int"}, {}),
    "FailureRecord": (
        {"rank": "int | None"},
        {"node": "int | None", "pid": "int | None", "exit_code": "int | None", "signal": "str | None",
         "at": "float | None", "error": "str | None", "last_lines": "Sequence[str] | None"},
    ),
    "FindingRecord": ({}, {"check": "str", "status": "str", "summary": "str", "evidence": "Mapping[str, Any]"}),
    "RankRecord": (
        {},
        {"rank": "int", "node": "int", "step": "int", "phase": "str", "idle_s": "float", "state": "str",
         "stack": "Sequence[str]", "cpu": "float | None"},
    ),
    "GitRecord": ({"commit": "str"}, {"dirty": "bool", "modified": "int", "branch": "str"}),
    "NetworkRecord": (
        {},
        {"name": "str", "family": "int", "interfaces": "Mapping[str, str]", "addresses": "Mapping[str, str]",
         "kind": "str", "speed_mbps": "float | None", "mtu": "int", "measured_mb_per_s": "float | None",
         "pinned": "bool", "proved": "bool | None", "problems": "Sequence[str]"},
    ),
    "AddressRecord": ({"host": "str", "interface": "str", "address": "str", "why": "str"}, {}),
    "XidRecord": ({"code": "int"}, {"bus": "str", "times": "int", "line": "str"}),
    "EvidenceRecord": (
        {},
        {"oom_kills": "int", "memory_limit": "int | None", "xids": "Sequence[XidRecord]", "gone": "Sequence[str]",
         "slurm": "Mapping[str, Any]"},
    ),
    "ParentRecord": ({"run": "str", "relation": "str"}, {"step": "int | None"}),
    "RoundRecord": (
        {"cause": "str", "began_at_step": "int", "committed": "int"},
        {"reached": "int | None", "where": "str", "foreign": "bool", "began_from": "str | None", "left": "str | None"},
    ),
}  # fmt: skip


def _reader(required: dict[str, str], optional: dict[str, str]) -> Reader:
    """A reader of records with these keys."""
    readers = {key: reader_of_type(annotation) for key, annotation in (required | optional).items()}
    anything = READERS["Any"]

    def read(value: object, left_out: list[object]) -> Any:
        if not isinstance(value, dict):
            return UNUSABLE
        usable = {}
        for key, item in value.items():
            before = len(left_out)
            kept = readers.get(key, anything)(item, left_out) if is_text(key) else UNUSABLE
            if kept is UNUSABLE:
                left_out.append(item)
            else:
                usable[key] = item if len(left_out) == before else kept
        return usable if required.keys() <= usable.keys() else UNUSABLE

    return read


for _name, _keys in RECORD_KEYS.items():
    READERS[_name] = _reader(*_keys)
    READERS[f"Sequence[{_name}]"] = list_of(READERS[_name], leave_out=True)
    # Ranks and nodes by number.
    READERS[f"Mapping[str, {_name}]"] = values_of(READERS[_name], is_index)
# ``elected`` is an index in this list.
READERS["Sequence[NetworkRecord]"] = list_of(READERS["NetworkRecord"])


T = TypeVar("T")
P = TypeVar("P", bound="Payload")
P_co = TypeVar("P_co", bound="Payload", covariant=True)

# Metadata of a field that is omitted from the line if it is None.
OMIT_NONE: Mapping[str, Any] = {"omit_none": True}


KINDS: dict[str, type[Payload]] = {}
"""The class of each kind of event, as far as their modules are imported (:func:`.journal_lines.payload_classes`)."""


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,))
def payload(kind: str = "") -> Callable[[type[P]], type[P]]:
    """Make a class a frozen dataclass, for events of this ``kind``; empty: for none.

    Comparison and ``repr`` are defined in :class:`Payload`: generating them for each of the many classes would double
    the time to import them, which delays commands such as ``status``.
    """

    def make(cls: type[P]) -> type[P]:
        made = dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)
        # The class is made anew for its slots, so that this one counts and not the decorated one.
        if kind:
            made.KIND = kind
            KINDS[kind] = made
        return made

    return make


@payload()
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
                record[key] = _plain_json(value)
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
        # Almost every line: nothing in it is unknown.
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


@payload()
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
        # Two writers may have the same time, and clocks may stand still.
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
        # Almost no line has such a number: only one that does is copied.
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(line), separators=(",", ":"))
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _plain_json(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Payload):
        return value.to_json()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return [_plain_json(item) for item in value]
    return value


class FieldLayout(NamedTuple):
    """A field of a payload: its ``name``, its ``key`` in journals, and how it is written and read."""

    name: str
    key: str
    omit_none: bool
    is_required: bool
    read: Reader


_LAYOUTS: dict[type[Payload], tuple[FieldLayout, ...]] = {}


def layout(cls: type[Payload]) -> tuple[FieldLayout, ...]:
    """The fields of a class, except :attr:`Payload.extra`."""
    # Once for each class: looking at annotations takes longer than reading a line. mypy refuses functools.cache here.
    if cls not in _LAYOUTS:
        _LAYOUTS[cls] = tuple(
            FieldLayout(
                name=each.name,
                key=each.metadata.get("key", each.name),
                omit_none=bool(each.metadata.get("omit_none")),
                is_required=each.default is MISSING and each.default_factory is MISSING,
                read=reader_of_type(str(each.type)),
            )
            for each in fields(cls)
            if each.name != "extra"
        )
    return _LAYOUTS[cls]
