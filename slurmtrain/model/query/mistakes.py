"""Mistakes in questions that only the runs show: fields that no run has, values that cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmtrain.errors import QueryError
from slurmtrain.model.query.conditions import Comparison, Condition
from slurmtrain.model.query.fields import ABSENT, Record, look_up, names_in
from slurmtrain.model.query.measures import KINDS, read_measure
from slurmtrain.model.query.where import point_at
from slurmtrain.model.spec.kinds import suggestion

_SHOWN = 3
_METRICS = "metrics."
_KINDS = f"; there are {', '.join(KINDS)}"


def check_field(name: str, records: Sequence[Record]) -> None:
    """Raise QueryError if no run has this field, although there are runs that would show it.

    A metric, for example, is unknown only if a run has metrics and none has this one.

    Args:
        name: The name of the field.
        records: All runs.
    """
    if not records or any(look_up(record, name) is not ABSENT for record in records):
        return
    if read_measure(name) is not None and not any(record["metrics"] for record in records):
        return
    head, dot, _ = name.partition(".")
    sections = [record[head] for record in records if dot and head in record]
    if sections and not any(sections):
        return
    names = names_in(records)
    raise QueryError(_unknown_measure(name, names) or f"none of these runs has a field {name!r}{_nearest(name, names)}")


def _unknown_measure(name: str, names: Sequence[str]) -> str:
    """What is wrong with a name that is meant to be a measure, such as ``min:los``; empty if it is not."""
    metrics = [each.removeprefix(_METRICS) for each in names if each.startswith(_METRICS)]
    measure = read_measure(name)
    if measure is None:
        kind, colon, metric = name.partition(":")
        if not colon or metric.removeprefix(_METRICS) not in metrics:
            return ""
        return f"there is no measure {kind!r}{suggestion(kind, KINDS) or _KINDS}"
    if name in metrics or not metrics:
        return ""
    return f"none of these runs has a metric {measure.metric!r}{suggestion(measure.metric, metrics)}"


def check_condition(condition: Condition, text: str, records: Sequence[Record]) -> None:
    """Raise QueryError, which shows where, if a condition compares what no run has, or what cannot be compared.

    Args:
        condition: The condition.
        text: The text that states it.
        records: All runs.
    """
    for comparison in condition.comparisons():
        try:
            check_field(comparison.name, records)
            # A measure is a number, and may take reading a file.
            is_measure = read_measure(comparison.name) is not None
            values = [0.0] if is_measure else [look_up(record, comparison.name) for record in records]
            _check_values(comparison, values)
        except QueryError as error:
            raise point_at(text, comparison.at, str(error)) from None


def _check_values(comparison: Comparison, values: Sequence[object]) -> None:
    sections = [value for value in values if isinstance(value, Mapping)]
    if sections and not all(literal.is_null for literal in comparison.literals):
        parts = dict.fromkeys(f"{comparison.name}.{part}" for section in sections for part in section)
        named = f", such as {', '.join([*parts][:_SHOWN])}" if parts else ""
        raise QueryError(f"{comparison.name!r} has several values{named}")
    text = next((literal.text for literal in comparison.literals if literal.is_text), None)
    if text is None or not comparison.is_order:
        return
    present = [value for value in values if value is not None and value is not ABSENT]
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        raise QueryError(f"{comparison.name!r} is a number, and {text!r} is none")


def _nearest(name: str, names: Sequence[str]) -> str:
    """The field that was meant: one that only lacks its section, such as ``params``, or the most similar one."""
    inner = [each for each in names if each.endswith(f".{name}")]
    if inner:
        return f"; did you mean {' or '.join(map(repr, inner[:_SHOWN]))}?"
    return suggestion(name, names) or "; 'slurmtrain status --json' prints all fields"
