"""The metric by which runs are judged, and which of its values are better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.errors import QueryError
from slurmtrain.model.query.direction import is_larger_better
from slurmtrain.model.query.fields import ABSENT, Record, look_up, names_in
from slurmtrain.model.query.mistakes import check_field

_METRICS = "metrics."


@dataclass(frozen=True, slots=True)
class Criterion:
    """``name``: a field, such as ``metrics.acc``. ``guessed``: only the name shows whether larger values are better."""

    name: str
    larger: bool
    guessed: bool = False

    @property
    def better(self) -> str:
        """Which values are better: ``larger`` or ``smaller``."""
        return "larger" if self.larger else "smaller"

    def __str__(self) -> str:
        return f"by {self.name}: {self.better} is better"


def choose_criterion(name: str | None, larger: bool | None, records: Sequence[Record]) -> Criterion:
    """What to judge runs by.

    Args:
        name: A field, or a metric without ``metrics.``; None: the only metric that the runs have.
        larger: Whether larger values are better; None: its name shows it.
        records: The runs.

    Raises:
        QueryError: There is no such field, or it does not show which values are better.
    """
    field = _only_metric(records) if name is None else field_of_metric(name, records)
    guess = is_larger_better(field.removeprefix(_METRICS))
    if larger is None and guess is None:
        raise QueryError(
            f"the name of {field} does not show whether larger or smaller values are better: --max or --min"
        )
    return Criterion(field, bool(guess if larger is None else larger), guessed=larger is None)


def field_of_metric(name: str, records: Sequence[Record]) -> str:
    """The field that ``name`` stands for, which may be a metric without ``metrics.``. Raises QueryError."""
    for field in (name, f"{_METRICS}{name}"):
        if any(look_up(record, field) is not ABSENT for record in records):
            return field
    check_field(name, records)
    return name


def _only_metric(records: Sequence[Record]) -> str:
    names = [f"{_METRICS}{name}" for name in names_in(record["metrics"] for record in records)]
    if len(names) == 1:
        return names[0]
    choice = f"choose a metric with --by: {', '.join(names)}" if names else "none of the runs has a metric"
    raise QueryError(choice)
