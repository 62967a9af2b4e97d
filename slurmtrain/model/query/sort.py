"""The order of runs: ``-metrics.val_loss,submitted_at``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slurmtrain.errors import QueryError
from slurmtrain.model.query.conditions import text_of
from slurmtrain.model.query.fields import Record, value_of
from slurmtrain.model.query.quantities import number_of

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
            raise QueryError(f"{text!r} is no order; write fields such as metrics.val_loss or -submitted_at")
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
    for key in reversed(keys):
        ordered = _by(ordered, key)
    return ordered


def _by(records: Sequence[R], key: SortKey) -> list[R]:
    values = [_sortable(value_of(record, key.name)) for record in records]
    read = {value: number_of(value) for value in values if isinstance(value, str)}
    if None not in read.values():
        values = [read[value] if isinstance(value, str) else value for value in values]
    numbers = [(value, place) for place, value in enumerate(values) if isinstance(value, int | float)]
    texts = [(value, place) for place, value in enumerate(values) if isinstance(value, str)]
    numbers.sort(key=lambda pair: pair[0], reverse=key.descending)
    texts.sort(key=lambda pair: pair[0], reverse=key.descending)
    missing = [record for record, value in zip(records, values, strict=True) if value is None]
    return [*(records[place] for _, place in [*numbers, *texts]), *missing]


def _sortable(value: Any) -> float | str | None:
    """A number, a text, or None for what has no value, or several."""
    if isinstance(value, list | tuple):
        return " ".join(map(text_of, value)) or None
    if value is None or value == "" or isinstance(value, dict):
        return None
    return number_of(value) if isinstance(value, int | float) and not isinstance(value, bool) else text_of(value)
