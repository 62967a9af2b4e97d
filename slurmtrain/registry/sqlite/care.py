"""Care of the registry's file: whether it is intact, copies, its size, and a new one in place of a damaged one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from slurmtrain.errors import PathError, RegistryFailed, RegistryUnusable, UserError
from slurmtrain.registry import schema
from slurmtrain.registry.dialects import insert
from slurmtrain.registry.sqlite.connections import held, lock_beside
from slurmtrain.registry.sqlite.file import open_file
from slurmtrain.system.files import create_private, describe_os_error, fsync_directory
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS

# So many of SQLite's findings are reported.
_MOST_FINDINGS = 20


def find_damage(path: Path) -> list[str]:
    """What is wrong with the file itself, in sentences; empty if it is intact.

    Raises:
        RegistryNewer: It was made by a newer version.
        RegistryUnusable: There is none, or one of another version.
        RegistryFailed: It cannot be read now; PathError, UntrustedPath.
    """
    try:
        engine = open_file(path, create=False)
        with contextlib.closing(_Disposed(engine)), engine.connect() as connection:
            findings = connection.exec_driver_sql(f"PRAGMA integrity_check({_MOST_FINDINGS})").scalars().all()
            damage = [str(finding) for finding in findings if finding != "ok"]
            return damage or list(_find_strays(connection))
    except RegistryUnusable as error:
        if isinstance(error.__cause__, sqlite3.DatabaseError):
            return [f"SQLite cannot read it: {error.__cause__}"]
        raise


class _Disposed:
    """Closes the connections of an engine."""

    def __init__(self, engine: sa.Engine) -> None:
        self.close = engine.dispose


def _find_strays(connection: sa.Connection) -> Iterator[str]:
    """Rows of runs that have no row of their own."""
    for table in schema.metadata.sorted_tables:
        if "run_id" in table.columns and table is not schema.sent:
            stray = table.c.run_id.not_in(sa.select(schema.run.c.id))
            count = connection.execute(sa.select(sa.func.count()).select_from(table).where(stray)).scalar()
            if count:
                yield f"the table {table.name} has {count} rows of runs that the table run does not have"


def back_up(path: Path, target: Path) -> int:
    """Copy the registry as it is at one moment; returns the size of the copy in bytes.

    A kill leaves no file of the name of the ``target``.

    Raises:
        UserError: There is a file of this name.
        RegistryUnusable: There is no registry; RegistryFailed, PathError.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists: choose another name, or move it away")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    engine = open_file(path, create=False)
    try:
        create_private(unfinished)
        # Nobody else has the new file, and its file system may have no locks.
        uri = f"file:{quote(str(unfinished))}?vfs={SQLITE_WITHOUT_LOCKS}"
        with engine.connect() as source, contextlib.closing(sqlite3.connect(uri, uri=True)) as copy:
            registry = source.connection.driver_connection
            assert isinstance(registry, sqlite3.Connection)
            registry.backup(copy)
        size = unfinished.stat().st_size
        # A link, which does not replace what another command has put there meanwhile.
        os.link(unfinished, target)
        fsync_directory(target.parent)
    except FileExistsError:
        raise UserError(f"{target} exists: choose another name, or move it away") from None
    except OSError as error:
        raise PathError(f"cannot copy the registry to {target}: {describe_os_error(error)}") from error
    except sqlite3.Error as error:
        raise RegistryFailed(f"cannot copy the registry {path} to {target}: {error}") from error
    finally:
        engine.dispose()
        unfinished.unlink(missing_ok=True)
    return size


def vacuum(path: Path) -> tuple[int, int]:
    """Give the space of deleted rows back to the file system; returns the size in bytes before and after.

    SQLite does it in a transaction of its own: a kill leaves the file as it was.

    Raises:
        RegistryUnusable: There is no registry; RegistryFailed, PathError.
    """
    before = path.stat().st_size if path.exists() else 0
    engine = open_file(path, create=False)
    try:
        # Not through SQLAlchemy, which begins a transaction.
        with contextlib.closing(engine.raw_connection()) as connection:
            connection.cursor().execute("VACUUM")
    except sqlite3.Error as error:
        raise RegistryFailed(f"cannot shrink the registry {path}: {error}") from error
    finally:
        engine.dispose()
    return before, path.stat().st_size


def replace_damaged(path: Path, fill: Callable[[Path], None]) -> tuple[Path, int]:
    """Put a complete registry in place of a damaged one, which is kept beside it with its journal.

    Until then the damaged one is there; a kill leaves one of the two, and maybe an unfinished file.

    Args:
        path: The damaged file.
        fill: Makes a registry of this name, from the run directories.

    Returns:
        Where the damaged one is now, and how many rows about what trackers have were taken over from it.

    Raises:
        RegistryFailed: Somebody else has the lock, or what ``fill`` raises.
    """
    new, old = path.with_name(f".{path.name}.repair"), _free_name(path)
    with held(lock_beside(path)):
        for suffix in ("", "-journal"):
            new.with_name(new.name + suffix).unlink(missing_ok=True)
        fill(new)
        rows = _readable_rows(path, schema.sent)
        engine = open_file(new, create=False)
        with engine.begin() as connection:
            statement = insert("sqlite", "ignore", schema.sent, tuple(schema.sent.columns.keys()))
            if rows:
                connection.exec_driver_sql(statement, rows)
        engine.dispose()
        # The journal first: SQLite would undo the new file's pages by it.
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}-journal").rename(old.with_name(f"{old.name}-journal"))
        os.link(path, old)
        new.replace(path)
        fsync_directory(path.parent)
    return old, len(rows)


def _free_name(path: Path) -> Path:
    """A name for a file that is put aside, which nothing has."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists() and not name.is_symlink())


def _readable_rows(path: Path, table: sa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table that can be read from a damaged file, from its beginning and from its end."""
    rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    keys = [column.name for column in table.primary_key]
    names = table.columns.keys()
    uri = f"file:{quote(str(path))}?mode=ro&vfs={SQLITE_WITHOUT_LOCKS}"
    for order in ("ASC", "DESC"):
        # Every name is the schema's.
        query = f'SELECT {", ".join(names)} FROM "{table.name}" ORDER BY rowid {order}'  # noqa: S608
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            for row in connection.execute(query):
                by_name: Mapping[str, Any] = dict(zip(names, row, strict=True))
                if _fits(table, row):
                    rows[tuple(by_name[key] for key in keys)] = tuple(row)
    return list(rows.values())


def _fits(table: sa.Table, row: Sequence[Any]) -> bool:
    return all(
        (value is None and column.nullable)
        or isinstance(value, (int, float) if isinstance(column.type, sa.Float) else column.type.python_type)
        for column, value in zip(table.columns, row, strict=True)
    )
