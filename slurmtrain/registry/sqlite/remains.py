"""What is left in a damaged file: whether it was a registry, and the rows of a table that can still be read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from slurmtrain.errors import RegistryFailed
from slurmtrain.registry import schema
from slurmtrain.registry.sqlite.connections import NoFileLocks, exclusive_engine, lock_beside, patient_engine
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS

# Without it, SQLite reads nothing of a file that is shorter than its header has it (lockBtree() in its btree.c).
_LENIENT = "PRAGMA writable_schema=ON"
# SQLite corrects the size in its copy of such a header, and would need a file for what to undo.
_WITHOUT_JOURNAL = "PRAGMA journal_mode=MEMORY"


def was_registry(path: Path) -> bool:
    """Whether a file that SQLite cannot read was a registry.

    Its tables decide; if they cannot be read, whether slurmtrain has made a registry there: then its lock lies beside.
    """
    uri = f"file:{quote(str(path))}?mode=ro&vfs={SQLITE_WITHOUT_LOCKS}"
    tables: list[str] = []
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.execute(_LENIENT)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        [(application,)] = connection.execute("PRAGMA application_id")
        if application:
            return False
    return schema.is_registry(tables) if tables else lock_beside(path).is_file()


@contextlib.contextmanager
def sole_user(path: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection to a damaged file that keeps all other processes from it.

    None if SQLite cannot even begin a transaction: no other process can either. Raises RegistryFailed if another
    process has the file for too long.
    """
    with contextlib.ExitStack() as stack:
        try:
            connection = _begun(stack, patient_engine(path))
        except NoFileLocks:
            connection = _begun(stack, exclusive_engine(path))
        yield connection


def _begun(stack: contextlib.ExitStack, engine: sa.Engine) -> sqlite3.Connection | None:
    stack.callback(engine.dispose)
    fairy = stack.enter_context(contextlib.closing(engine.raw_connection()))
    connection = fairy.driver_connection
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None
    try:
        for statement in (_LENIENT, _WITHOUT_JOURNAL, "BEGIN EXCLUSIVE"):
            connection.cursor().execute(statement)
    except sqlite3.OperationalError as error:
        raise RegistryFailed(f"cannot lock the registry: {error}") from error
    except sqlite3.DatabaseError:
        return None
    return connection


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Rows of a table of a damaged file. ``complete``: nothing in the table was unreadable."""

    rows: list[tuple[Any, ...]]
    complete: bool


def salvage(
    connection: sqlite3.Connection | None, table: sa.Table, is_whole: Callable[[Mapping[str, Any]], bool]
) -> Salvaged:
    """The rows of a table that can be read, from its beginning and from its end.

    Args:
        connection: The damaged file; None: nothing of it can be read.
        table: The table.
        is_whole: Whether a row, by column, is as slurmtrain writes them.
    """
    if connection is None:
        return Salvaged([], complete=False)
    names = table.columns.keys()
    keys = [column.name for column in table.primary_key]
    rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    complete = True
    for order in ("ASC", "DESC"):
        # Every name is the schema's.
        query = f'SELECT {", ".join(names)} FROM "{table.name}" ORDER BY rowid {order}'  # noqa: S608
        try:
            for row in connection.execute(query):
                by_name = dict(zip(names, row, strict=True))
                if is_whole(by_name):
                    rows[tuple(by_name[key] for key in keys)] = row
                else:
                    complete = False
        except sqlite3.Error:
            complete = False
    return Salvaged(list(rows.values()), complete)
