"""Rows of a registry that commands could not read, although the database has no fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from slurmtrain.errors import RegistryDamaged
from slurmtrain.model.metrics.summary import LineSummary
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.registry import queries, schema
from slurmtrain.registry.choice.listed import Listed
from slurmtrain.registry.damage.values import NOT_OURS
from slurmtrain.registry.database import reading
from slurmtrain.registry.fact_rows import GARBAGE, LEDGER, PROGRESS, event_of
from slurmtrain.registry.line_rows import METRICS
from slurmtrain.registry.rows import ATTEMPTS, CHECKPOINTS, RUNS
from slurmtrain.registry.sent import SENT

Row = Mapping[str, Any]
# The rows of so many runs are read at a time.
_BATCH = 500
_UNREADABLE = (*NOT_OURS, RegistryDamaged)


def _read_run(row: Row) -> None:
    RUNS.read(row, attempts=[], checkpoints=[])
    listed = Listed(row)
    for name in ("metrics", "params", "resources", "tags", "nodes", "git", "checkpoint"):
        getattr(listed, name)


def _read_attempt(row: Row) -> None:
    assert ATTEMPTS.read(row, spent={}).nodes is not None


_READERS: Mapping[str, Callable[[Row], object]] = {
    schema.run.name: _read_run,
    schema.attempt.name: _read_attempt,
    schema.checkpoint.name: CHECKPOINTS.read,
    schema.ledger.name: LEDGER.read,
    schema.event.name: event_of,
    schema.progress.name: PROGRESS.read,
    schema.garbage.name: GARBAGE.read,
    schema.metric.name: METRICS.read,
    schema.sent.name: SENT.read,
    schema.builder.name: lambda row: RunBuilder.from_dict(row["run_id"], json.loads(row["facts"]), list),
    schema.line.name: lambda row: LineSummary.from_json(json.loads(row["made_of"]), {}),
}


def find_unreadable(engine: sa.Engine) -> list[str]:
    """The tables of which commands cannot read everything, in sentences."""
    with reading(engine) as connection:
        ids = [*connection.execute(sa.select(schema.run.c.id)).scalars()]
        batches = [ids[first : first + _BATCH] for first in range(0, len(ids), _BATCH)]
        return [
            f"the table {table.name} holds what slurmtrain has not written ({problem})"
            for table in schema.metadata.sorted_tables
            for problem in [next(_problems(connection, table, batches), "")]
            if problem
        ]


def is_readable(table: sa.Table, row: Row) -> bool:
    """Whether a row, by column, is one that commands can read."""
    if not all(map(isinstance, row.values(), queries.types_of(table))):
        return False
    try:
        _READERS[table.name](row)
    except _UNREADABLE:
        return False
    return True


def _problems(connection: sa.Connection, table: sa.Table, batches: list[list[str]]) -> Iterator[str]:
    read = _READERS.get(table.name, bool)
    for batch in batches:
        try:
            for row in queries.rows(connection, table, batch):
                read(row)
        except _UNREADABLE as error:
            yield f"{type(error).__name__}: {error}"
