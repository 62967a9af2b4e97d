"""Rows of many runs in one statement: what the registry's readers and its transactions both ask.

The ids of the runs go to SQLite as one JSON array, so there is no limit to their number, and a question about ten
thousand runs is as many statements as one about a single run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from slurmtrain.registry import schema


def rows(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str] | None = None, *where: sa.ColumnElement[bool]
) -> Iterator[dict[str, Any]]:
    """Rows by column, in no order, their JSON as text.

    Args:
        connection: Where to ask.
        table: Any table of rows that belong to runs.
        run_ids: The runs; None for all.
        where: What else the rows must meet.
    """
    names = table.columns.keys()
    # Plain dicts of plain tuples: SQLAlchemy's own mapping of a row takes three times as long.
    return (dict(zip(names, row, strict=True)) for row in _execute(connection, table, run_ids, *where))


def rows_by_run(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    """The same rows by the id of their run; an empty list for a run that has none.

    Args:
        connection: Where to ask.
        table: Any table that has rows for runs.
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
    """What the time of attempts was spent on, in seconds by kind: by run and number of the attempt."""
    spent: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    # Eight rows an attempt: these are by far the most, so no dict is made of each.
    for run_id, attempt, kind, seconds in _execute(connection, schema.attempt_seconds, run_ids):
        spent[run_id, attempt][kind] = seconds
    return spent


def of_runs(table: sa.Table) -> sa.ColumnElement[bool]:
    """That a row belongs to one of the runs whose ids, as a JSON array, are the parameter ``ids``."""
    ids = sa.func.json_each(sa.bindparam("ids")).table_valued("value")
    key = table.c.id if table is schema.run else table.c.run_id
    return key.in_(sa.select(ids.c.value))


def _execute(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str] | None, *where: sa.ColumnElement[bool]
) -> Sequence[Any]:
    if run_ids is None:
        return connection.execute(_all(table).where(*where)).all()
    return connection.execute(_of_runs(table).where(*where), {"ids": json.dumps(list(run_ids))}).all()


@cache
def _all(table: sa.Table) -> sa.Select[Any]:
    columns = [
        sa.type_coerce(column, sa.String).label(column.name) if schema.is_json(column) else column
        for column in table.columns
    ]
    return sa.select(*columns)


@cache
def _of_runs(table: sa.Table) -> sa.Select[Any]:
    return _all(table).where(of_runs(table))
