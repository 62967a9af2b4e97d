"""Converting records of the model to rows of the tables and back.

Rows are plain tuples, and JSON stays text until it is needed: SQLAlchemy's own conversion, column by column, takes
several times as long as SQLite itself, which is noticeable in a command that reads a thousand runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import sqlalchemy as sa

from slurmtrain.model.experiment.kinds import remembering
from slurmtrain.model.metrics.columns import MetricSummary
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal_lines import Garbage, Progress, read_event
from slurmtrain.model.run.run import ENDED, UNREADABLE, Attempt, Checkpoint, LedgerEntry, Run, replace
from slurmtrain.registry import schema
from slurmtrain.registry.cells import Sent, as_cell, decode_as, read_cell, read_checkpoint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from slurmtrain.model.run.run import Live


Row = tuple[Any, ...]
T = TypeVar("T", bound="DataclassInstance")


class RowFormat(Generic[T]):
    """How records of one class are stored in a table: fields in columns of the same name, some as JSON."""

    def __init__(self, table: sa.Table, record: type[T], fields: Collection[str] | None = None) -> None:
        """The format of ``record``, a class, in a ``table``; ``fields``: the only ones that are read; None: all."""
        self.table = table
        self._record = record
        stored = schema.stored_fields(record)
        if fields is not None:
            stored = {name: type_ for name, type_ in stored.items() if name in fields}
        self._types = {column.name: stored[column.name] for column in table.columns if column.name in stored}
        self.columns = (*(column.name for column in table.columns if column.name not in stored), *self._types)
        self.fields = tuple(self._types)
        # attrgetter returns a tuple only for two names or more: each table has at least that many.
        self._values = attrgetter(*self._types)
        self._json = [i for i, name in enumerate(self._types) if schema.is_json(table.c[name])]
        self._decoders = [(name, t if schema.is_json(table.c[name]) else "") for name, t in self._types.items()]

    def row(self, record: Any, *leading: Any) -> Row:
        """The row of a record; ``leading`` are the values of the columns that are no fields of it, such as its run."""
        # All fields in one call of C: a run may have thousands of checkpoints.
        values = list(self._values(record))
        for i in self._json:
            values[i] = as_cell(values[i])
        return (*leading, *values)

    def json_of(self, record: Any) -> dict[str, Any]:
        """The stored fields of a record, by name."""
        return dict(zip(self._types, self._values(record), strict=True))

    def read(self, row: Mapping[str, Any], **more: Any) -> T:
        """The record of a ``row``, whose JSON is text; ``more`` are fields that are stored in other tables.

        Raises ValueError for JSON of another shape than the field has.
        """
        fields = {name: decode_as(row[name], type_) if type_ else row[name] for name, type_ in self._decoders}
        return self._record(**fields, **more)


ATTEMPTS = RowFormat(schema.attempt, Attempt)
# What costs and the hours of a day follow from: reading all that is known of thousands of attempts takes seconds.
_CHARGED = """
number job_id restart state cause hosts submitted_at started_at ended_at first_step pack share_gpu executor partition
partitions resources restarts
"""
CHARGED = RowFormat(schema.attempt, Attempt, frozenset(_CHARGED.split()))
CHECKPOINTS = RowFormat(schema.checkpoint, Checkpoint)
GARBAGE = RowFormat(schema.garbage, Garbage)
LEDGER = RowFormat(schema.ledger, LedgerEntry)
METRICS = RowFormat(schema.metric, MetricSummary)
PROGRESS = RowFormat(schema.progress, Progress)
RUNS = RowFormat(schema.run, Run)
SENT = RowFormat(schema.sent, Sent)


def run_row(run: Run, *, settled: bool, scanned: Sequence[int], revision: int) -> Row:
    """The row of a run, in the order of ``RUNS.columns``.

    Args:
        run: The run as its events describe it.
        settled: Whether it has ended and no process can still write to it.
        scanned: Times (ns) of its folders when its files were listed; empty if they are gone.
        revision: How many bytes of its journals and metrics have been read.
    """
    newest, checkpoint = run.newest, run.checkpoint
    shown = CHECKPOINTS.json_of(checkpoint) if checkpoint else None
    of_newest = (newest.job_id or None, newest.number, newest.cause, newest.nodes) if newest else (None, 0, None, [])
    *facts, nodes = of_newest
    # 0 is also the time of a folder that does not exist: one that comes back has another, and the run is read again.
    return RUNS.row(run, *facts, as_cell(nodes), as_cell(shown), settled, *(scanned or (0, 0)), revision)


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
    # Databases return rows in no order.
    ordered = [
        ATTEMPTS.read(attempt, spent=spent.get((row["id"], attempt["number"]), {}))
        for attempt in sorted(attempts, key=lambda attempt: int(attempt["number"]))
    ]
    # Whoever sorts nodes by their numbers must not be the first to notice.
    if not all(node.isdigit() for attempt in ordered for node in (*attempt.hosts, *attempt.partitions)):
        raise ValueError("hosts without the numbers of their nodes")
    run = RUNS.read(
        row,
        attempts=ordered,
        checkpoints=sorted(map(CHECKPOINTS.read, checkpoints), key=lambda checkpoint: checkpoint.order),
    )
    return replace(run, params=remembering(run.params, run.written)) if run.written else run


def event_of(row: Mapping[str, Any]) -> AnyEvent | None:
    """An event from its row, whose data is the line of the journal, or what an earlier version kept of it."""
    record = {**json.loads(row["data"]), "t": row["time"], "kind": row["kind"]}
    return read_event(record, row["source"], row["offset"])


_LISTED = {
    column.name: {**schema.stored_fields(Run), **schema.OF_NEWEST}[column.name] if schema.is_json(column) else ""
    for column in schema.run.columns
}


class _Columns:
    """The columns of a run's row as attributes; JSON is decoded only when it is accessed. Raises RegistryDamaged."""

    row: Mapping[str, Any]
    id: str
    name: str
    state: str
    reason: str
    revision: int
    job_id: str | None
    attempt: int
    nodes: list[str]
    checkpoint: Checkpoint | None
    metrics: dict[str, float]
    params: dict[str, Any]
    resources: dict[str, Any]
    sweep: str | None
    parents: list[dict[str, Any]]
    tags: list[str]
    git: dict[str, Any] | None

    # Called for all names above: an annotation alone makes no attribute, and is there for type checkers.
    def __getattr__(self, name: str) -> Any:
        if name not in _LISTED:
            raise AttributeError(f"a run in a list has no {name!r}")
        cell = self.row[name]
        if name == "checkpoint":
            return read_cell(read_checkpoint, cell)
        if not _LISTED[name]:
            return cell
        value = decode_cell(cell, _LISTED[name])
        # JSON has numbers only: how a person wrote them is in a column of its own.
        if name == "params":
            return read_cell(lambda rows: remembering(value, rows), decode_cell(self.row["written"], "Sequence[Any]"))
        return value


@dataclass(frozen=True, slots=True)
class Listed(_Columns):
    """A run as lists show it. ``row`` is the registry's.

    ``live`` is what the scheduler reports right now, which is not stored. ``mirrored``: whether trackers have all that
    they can be sent of it; None: none is to have it, or that is unknown.
    """

    row: Mapping[str, Any]
    live: Live | None = None
    mirrored: bool | None = None
    trackers: Sequence[Mapping[str, Any]] = ()
    """The rows of what trackers have of it."""

    @property
    def ended(self) -> bool:
        """Whether it has ended; it may still be started again."""
        return self.state in ENDED

    @property
    def unreadable(self) -> bool:
        """Whether its journals cannot be read."""
        return self.state == UNREADABLE


def decode_cell(cell: str | None, annotation: str) -> Any:
    """What a cell holds, of the shape of an ``annotation``. Raises RegistryDamaged."""
    return read_cell(lambda text: decode_as(text, annotation), cell)


def is_mirrored(row: Mapping[str, Any], sent: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether trackers have all that they can be sent of a run; None: none is to have it, or that is unknown.

    Args:
        row: The run's.
        sent: What its trackers have: the rows.
    """
    if not row["attempt"] or row["tracked"] is False or (row["tracked"] is None and not sent):
        return None
    return bool(sent) and all(each["revision"] == row["revision"] for each in sent)
