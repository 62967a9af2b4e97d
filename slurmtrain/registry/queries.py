"""Rows of many runs in one statement: queries that the registry's readers and its transactions share.

The ids of the runs are passed to the database as one JSON array, so there is no limit to their number, and a query
about ten thousand runs takes as many statements as one about a single run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from slurmtrain.registry import schema


def rows(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str] | None = None, *where: sa.ColumnElement[bool]
) -> Iterator[dict[str, Any]]:
    """Rows as dicts by column, in no order, with JSON as text.

    Args:
        connection: The connection to query.
        table: Any table whose rows belong to runs.
        run_ids: The runs; None for all.
        where: Further conditions on the rows.
    """
    names = table.columns.keys()
    # Plain dicts of plain tuples: SQLAlchemy's own mapping of a row takes three times as long.
    return (dict(zip(names, row, strict=True)) for row in _execute(connection, table, run_ids, *where))


def rows_by_run(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    """Rows as :func:`rows` returns them, grouped by the id of their run; an empty list for a run without rows.

    Args:
        connection: The connection to query.
        table: Any table whose rows belong to runs.
        run_ids: The runs.
    """
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows(connection, table, run_ids):
        grouped[row["run_id"]].append(row)
    return grouped


def offsets(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """How far each file of these runs has been read, in bytes: by run, then by the file's name."""
    by_run: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows(connection, schema.source, run_ids):
        by_run[row["run_id"]][row["path"]] = row["offset"]
    return by_run


def spent_seconds(connection: sa.Connection, run_ids: Collection[str]) -> dict[tuple[str, int], dict[str, float]]:
    """What the time of attempts was spent on, in seconds by kind, for each run and number of the attempt."""
    spent: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    # Eight rows for each attempt: this is by far the largest table, so no dict is made of each row.
    for run_id, attempt, kind, seconds in _execute(connection, schema.attempt_seconds, run_ids):
        spent[run_id, attempt][kind] = seconds
    return spent


def fetch(
    connection: sa.Connection, query: sa.Select[Any], parameters: Mapping[str, Any] | None = None
) -> Sequence[tuple[Any, ...]]:
    """The rows of a query as the driver's own tuples: SQLAlchemy's take three times as long.

    Args:
        connection: The connection to query.
        query: What to read.
        parameters: Values of its parameters.
    """
    result = connection.execute(query, parameters or {})
    # Not by the driver's cursor alone, which would raise the driver's errors.
    rows: Sequence[tuple[Any, ...]] = result.cursor_strategy.fetchall(result, result.cursor)
    return rows


def of_runs(table: sa.Table) -> sa.ColumnElement[bool]:
    """The condition that a row belongs to one of the runs in the parameter ``ids``, a JSON array of their ids."""
    ids = sa.func.texts_in(sa.bindparam("ids")).table_valued("value")
    key = table.c.id if table is schema.run else table.c.run_id
    return key.in_(sa.select(ids.c.value))


def _execute(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str] | None, *where: sa.ColumnElement[bool]
) -> Sequence[Any]:
    if run_ids is None:
        rows = connection.execute(_all(table).where(*where)).all()
    else:
        rows = connection.execute(_of_runs(table).where(*where), {"ids": json.dumps(list(run_ids))}).all()
    types = types_of(table)
    # SQLite stores any value in any column.
    if not all(all(map(isinstance, row, types)) for row in rows):
        raise ValueError(f"a value of the wrong type in the table {table.name!r}")
    return rows


@cache
def types_of(table: sa.Table) -> list[tuple[type, ...]]:
    """The types that the values of each column may have."""
    return [
        (
            column.type.python_type,
            *((int,) if isinstance(column.type, sa.Float) else ()),
            *((type(None),) if column.nullable else ()),
        )
        for column in table.columns
    ]


@cache
def _all(table: sa.Table) -> sa.Select[Any]:
    return sa.select(*table.columns)


@cache
def _of_runs(table: sa.Table) -> sa.Select[Any]:
    return _all(table).where(of_runs(table))
