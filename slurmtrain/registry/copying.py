"""Copying a registry to another database: all of it in one transaction, which ends only if both hold the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from slurmtrain.errors import RegistryFailed, RegistryUnusable
from slurmtrain.registry import schema
from slurmtrain.registry.dialects import insert
from slurmtrain.registry.store import open_engine, reading

if TYPE_CHECKING:
    from slurmtrain.model.urls import DatabaseUrl

# So many rows are in memory at once.
_BATCH = 5_000


def copy_registry(source: Path | DatabaseUrl, target: Path | DatabaseUrl) -> dict[str, int]:
    """Copy the rows of ``source`` into ``target``, and remove all others; returns the number of rows of each table.

    A kill leaves the target as it was. Nobody else may write to either meanwhile, except to a source on a server: its
    rows at the beginning are copied.

    Args:
        source: A registry of this version.
        target: Where none is, an empty one, or one that has only runs of the source.

    Raises:
        RegistryUnusable: There is no registry to copy, or the target has other runs.
        RegistryFailed: A database cannot be used now, or what was written is not what was read.
    """
    old, new = open_engine(source, create=False), open_engine(target)
    try:
        with reading(old) as reader, new.begin() as writer:
            _check_runs(reader, writer, target)
            return {table.name: _copy_table(reader, writer, table) for table in schema.metadata.sorted_tables}
    except ValueError as error:  # SQLite stores any value in any column, PostgreSQL does not
        raise RegistryUnusable(
            f"{source} holds what slurmtrain has not written ({error}): run 'slurmtrain registry rebuild' with it first"
        ) from error
    finally:
        old.dispose()
        new.dispose()


def _check_runs(reader: sa.Connection, writer: sa.Connection, target: Path | DatabaseUrl) -> None:
    """Raise RegistryUnusable if the target has runs that the source does not have."""
    of_source, of_target = (
        {run_id for (run_id,) in each.execute(sa.select(schema.run.c.id))} for each in (reader, writer)
    )
    others = sorted(of_target - of_source)
    if others:
        raise RegistryUnusable(
            f"{target} has {len(others)} runs that are not in the registry to be copied, such as {others[-1]}: choose "
            "an empty database"
        )


def _copy_table(reader: sa.Connection, writer: sa.Connection, table: sa.Table) -> int:
    """Replace a table's rows; returns their number. Raises RegistryFailed if the database has others afterwards."""
    read, written = _Rows(), _Rows()
    statement = insert(writer.dialect.name, "fail", table, tuple(table.columns.keys()))
    writer.execute(table.delete())
    for rows in _batches(reader, table):
        read.add(rows)
        writer.exec_driver_sql(statement, rows)
    for rows in _batches(writer, table):
        written.add(rows)
    if (read.count, read.digest()) != (written.count, written.digest()):
        raise RegistryFailed(
            f"the copy of the table {table.name!r} is not what was read ({written.count} rows of {read.count}); "
            "nothing was stored: try again, and copy to another database if that does not help"
        )
    return read.count


def _batches(connection: sa.Connection, table: sa.Table) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of a table in the order of their keys, which is the same in every database."""
    query = sa.select(*table.columns).order_by(*table.primary_key)
    with connection.execute(query, execution_options={"stream_results": True}) as result:
        for rows in result.partitions(_BATCH):
            yield [tuple(row) for row in rows]


@dataclass(slots=True)
class _Rows:
    """The number of rows, and a hash of their values."""

    count: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, rows: list[tuple[Any, ...]]) -> None:
        self.count += len(rows)
        # PostgreSQL has this character in place of NUL (slurmtrain.registry.postgresql).
        self._hash.update(repr(rows).replace("\\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="surrogatepass"))

    def digest(self) -> str:
        return str(self._hash.hexdigest())
