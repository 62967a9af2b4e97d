"""Rows of the tables from the nouns of the model, and back; here those of runs, attempts and checkpoints.

Rows are plain tuples, and JSON is text until it is needed: SQLAlchemy's own conversion, column by column, takes several
times as long as SQLite itself, which a command feels that reads a thousand runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import sqlalchemy as sa

from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.registry import schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = tuple[Any, ...]
# Most of an attempt's columns are empty, and a look-up takes a tenth of what reading JSON does.
_EMPTY: Mapping[str | None, Callable[[], Any]] = {"{}": dict, "[]": list, "null": lambda: None}
_EMPTY_TEXTS: Mapping[type, str] = {dict: "{}", list: "[]", tuple: "[]"}
T = TypeVar("T", bound="DataclassInstance")


def encode(value: Any) -> str | None:
    """JSON as text; None as NULL."""
    if value is None:
        return None
    return json.dumps(value) if value else _EMPTY_TEXTS.get(type(value)) or json.dumps(value)


def decode(text: str | None) -> Any:
    """What :func:`encode` was given. Rows of earlier versions have ``null`` where there is nothing."""
    if text in _EMPTY:
        return _EMPTY[text]()
    return None if text is None else json.loads(text)


class RowFormat(Generic[T]):
    """How records of one class are kept in a table: attributes in columns of the same name, some of them as JSON."""

    def __init__(self, table: sa.Table, record: type[T], *leading: str) -> None:
        """``leading``: columns before the record's own, such as the id of its run."""
        self.table = table
        self._record = record
        self.names = tuple(f.name for f in fields(record) if f.name in table.columns and f.name not in leading)
        self.columns = (*leading, *self.names)
        self._values = attrgetter(*self.names)
        self._json = [i for i, name in enumerate(self.names) if schema.is_json(table.c[name])]
        self._decoders = [(name, decode if schema.is_json(table.c[name]) else None) for name in self.names]

    def row(self, record: Any, *leading: Any) -> Row:
        """The row of a record; ``leading`` are the values of the leading columns."""
        values = list(self._values(record))
        for i in self._json:
            values[i] = encode(values[i])
        return (*leading, *values)

    def read(self, row: Mapping[str, Any], **more: Any) -> T:
        """The record that a row, whose JSON is text, describes; ``more`` are fields that other tables have."""
        fields = {name: row[name] if decoder is None else decoder(row[name]) for name, decoder in self._decoders}
        return self._record(**fields, **more)


ATTEMPTS = RowFormat(schema.attempt, Attempt, "run_id")
CHECKPOINTS = RowFormat(schema.checkpoint, Checkpoint, "run_id")
# Of the newest attempt and checkpoint, what the list of runs shows stands in the run's own row.
RUNS = RowFormat(
    schema.run, Run, "job_id", "attempt", "checkpoint", "settled", "journals_at", "attempts_at", "revision"
)


def run_row(run: Run, *, settled: bool, scanned: Sequence[int], revision: int) -> Row:
    """The row of a run.

    Args:
        run: The run as its events describe it.
        settled: Whether nothing more can come of it.
        scanned: Times (ns) of its folders when its files were listed; empty where they are gone.
        revision: Bytes of its journals and metrics that were read.
    """
    newest, checkpoint = run.newest, run.checkpoint
    shown = None if checkpoint is None else {name: getattr(checkpoint, name) for name in CHECKPOINTS.names}
    job_id, number = ((newest.job_id or None), newest.number) if newest else (None, 0)
    return RUNS.row(run, job_id, number, encode(shown), settled, *(scanned or (0, 0)), revision)


def run_of(
    row: Mapping[str, Any],
    attempts: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Mapping[str, Any]],
    spent: Mapping[tuple[str, int], Mapping[str, float]],
) -> Run:
    """A run from its rows, which come in any order.

    Args:
        row: Its own row.
        attempts: The rows of its attempts.
        checkpoints: The rows of its checkpoints.
        spent: What the time of attempts was spent on, in seconds by kind: by run and number of the attempt.
    """
    ordered = sorted(attempts, key=lambda attempt: int(attempt["number"]))
    return RUNS.read(
        row,
        attempts=[ATTEMPTS.read(attempt, spent=spent.get((row["id"], attempt["number"]), {})) for attempt in ordered],
        checkpoints=sorted(map(CHECKPOINTS.read, checkpoints), key=lambda checkpoint: checkpoint.order),
    )
