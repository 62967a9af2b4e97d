"""Converting records of the model to rows of the tables and back; here for runs, attempts and checkpoints.

Rows are plain tuples, and JSON stays text until it is needed: SQLAlchemy's own conversion, column by column, takes
several times as long as SQLite itself, which is noticeable in a command that reads a thousand runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import sqlalchemy as sa

from slurmtrain.model.run.run import Attempt, Checkpoint, Run, replace
from slurmtrain.model.written import remembering
from slurmtrain.registry import schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = tuple[Any, ...]
# Most columns of an attempt are empty, and a look-up takes a tenth of the time of parsing JSON.
_EMPTY: Mapping[str | None, Callable[[], Any]] = {"{}": dict, "[]": list, "null": lambda: None}
_EMPTY_TEXTS: Mapping[type, str] = {dict: "{}", list: "[]", tuple: "[]"}
_MAPPING, _SEQUENCE = "Mapping[str, ", "Sequence["
_SCALARS: Mapping[str, type | tuple[type, ...]] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
T = TypeVar("T", bound="DataclassInstance")


def encode(value: Any) -> str | None:
    """``value`` as JSON text; None for NULL."""
    if value is None:
        return None
    return json.dumps(value) if value else _EMPTY_TEXTS.get(type(value)) or json.dumps(value)


def decode(text: str | None) -> Any:
    """The value that :func:`encode` was given. Rows of earlier versions may contain ``null`` instead of NULL."""
    if text in _EMPTY:
        return _EMPTY[text]()
    return None if text is None else json.loads(text)


def decode_as(text: str | None, annotation: str) -> Any:
    """Decode the value of a field.

    Args:
        text: What :func:`encode` has made of it.
        annotation: The type of the field, as in its class. Raises ValueError if the value has another shape.
    """
    value = decode(text)
    if value and not fits(value, annotation):
        raise ValueError(f"JSON of another shape than {annotation}")
    return value


def fits(value: object, annotation: str) -> bool:
    """Whether objects, lists, text and numbers are where an annotation has them."""
    bare = annotation.removesuffix(" | None")
    if value is None and bare != annotation:
        return True
    if bare.startswith(_MAPPING):
        return isinstance(value, dict) and all(fits(each, bare[len(_MAPPING) : -1]) for each in value.values())
    if bare.startswith(_SEQUENCE):
        return isinstance(value, list) and all(fits(each, bare[len(_SEQUENCE) : -1]) for each in value)
    return isinstance(value, _SCALARS.get(bare, object))


class RowFormat(Generic[T]):
    """How records of one class are stored in a table: attributes in columns of the same name, some as JSON."""

    def __init__(self, table: sa.Table, record: type[T], *leading: str) -> None:
        """``leading``: columns in front of the record's own, such as the id of its run."""
        self.table = table
        self._record = record
        self.names = tuple(f.name for f in fields(record) if f.name in table.columns and f.name not in leading)
        self.columns = (*leading, *self.names)
        self._values = attrgetter(*self.names)
        self._json = [i for i, name in enumerate(self.names) if schema.is_json(table.c[name])]
        types = {f.name: str(f.type) for f in fields(record)}
        self._decoders = [(name, types[name] if schema.is_json(table.c[name]) else "") for name in self.names]

    def row(self, record: Any, *leading: Any) -> Row:
        """The row of a record; ``leading`` are the values of the leading columns."""
        values = list(self._values(record))
        for i in self._json:
            values[i] = encode(values[i])
        return (*leading, *values)

    def read(self, row: Mapping[str, Any], **more: Any) -> T:
        """The record of a ``row``, whose JSON is text; ``more`` are fields that are stored in other tables.

        Raises ValueError for JSON of another shape than the field has.
        """
        fields = {name: decode_as(row[name], type_) if type_ else row[name] for name, type_ in self._decoders}
        return self._record(**fields, **more)


_CHECKPOINT_TYPES = {f.name: str(f.type) for f in fields(Checkpoint)}

ATTEMPTS = RowFormat(schema.attempt, Attempt, "run_id")
CHECKPOINTS = RowFormat(schema.checkpoint, Checkpoint, "run_id")
# What the list of runs shows of the newest attempt and checkpoint is in the run's own row.
RUNS = RowFormat(
    schema.run,
    Run,
    "job_id",
    "attempt",
    "cause",
    "nodes",
    "checkpoint",
    "settled",
    "journals_at",
    "attempts_at",
    "revision",
)


def run_row(run: Run, *, settled: bool, scanned: Sequence[int], revision: int) -> Row:
    """The row of a run.

    Args:
        run: The run as its events describe it.
        settled: Whether it has ended and no process can still write to it.
        scanned: Times (ns) of its folders when its files were listed; empty if they are gone.
        revision: How many bytes of its journals and metrics have been read.
    """
    newest, checkpoint = run.newest, run.checkpoint
    shown = None if checkpoint is None else {name: getattr(checkpoint, name) for name in CHECKPOINTS.names}
    of_newest = (newest.job_id or None, newest.number, newest.cause, newest.nodes) if newest else (None, 0, None, [])
    *facts, nodes = of_newest
    return RUNS.row(run, *facts, encode(nodes), encode(shown), settled, *(scanned or (0, 0)), revision)


def read_checkpoint(text: str | None) -> Checkpoint | None:
    """The checkpoint in a run's own row. Raises ValueError or TypeError for JSON of another shape."""
    fields = decode_as(text, "Mapping[str, Any]")
    if not fields:
        return None
    wrong = [name for name, value in fields.items() if not fits(value, _CHECKPOINT_TYPES.get(name, ""))]
    if wrong:
        raise ValueError(f"a checkpoint with another {wrong[0]}")
    return Checkpoint(**fields)


def run_of(
    row: Mapping[str, Any],
    attempts: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Mapping[str, Any]],
    spent: Mapping[tuple[str, int], Mapping[str, float]],
) -> Run:
    """A run from its rows, which may be in any order.

    Args:
        row: Its own row.
        attempts: The rows of its attempts.
        checkpoints: The rows of its checkpoints.
        spent: What the time of attempts was spent on, in seconds by kind, for each run and number of the attempt.
    """
    ordered = sorted(attempts, key=lambda attempt: int(attempt["number"]))
    run = RUNS.read(
        row,
        attempts=[ATTEMPTS.read(attempt, spent=spent.get((row["id"], attempt["number"]), {})) for attempt in ordered],
        checkpoints=sorted(map(CHECKPOINTS.read, checkpoints), key=lambda checkpoint: checkpoint.order),
    )
    return replace(run, params=remembering(run.params, run.written)) if run.written else run
