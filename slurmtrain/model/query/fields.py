"""Fields of a run by the names that they have in the JSON: ``state``, ``params.lr``, ``metrics.val_loss``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

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
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record[head] if dot and head in record else None
    return look_up(inner, rest) if isinstance(inner, Mapping) else ABSENT


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
