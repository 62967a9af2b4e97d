"""Care of the registry's file: whether SQLite finds it intact, copies, its size."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from slurmtrain.errors import PathError, RegistryDamaged, RegistryFailed, UserError
from slurmtrain.registry import schema
from slurmtrain.registry.sqlite.connections import READS
from slurmtrain.registry.sqlite.file import open_file
from slurmtrain.system.files import create_private, describe_os_error, fsync_directory
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS

# So many of SQLite's findings are reported.
_MOST_FINDINGS = 20


def find_file_damage(path: Path) -> list[str]:
    """What SQLite finds wrong with a registry's file, of this or an earlier version; and rows that belong to nothing.

    Raises:
        RegistryNewer: It was made by a newer version.
        RegistryUnusable: There is none.
        RegistryFailed: It cannot be read now; PathError, UntrustedPath.
    """
    try:
        with contextlib.ExitStack() as stack:
            engine = open_file(path, create=False, as_is=True)
            stack.callback(engine.dispose)
            connection = stack.enter_context(engine.connect().execution_options(**READS))
            findings = connection.exec_driver_sql(f"PRAGMA integrity_check({_MOST_FINDINGS})").scalars().all()
            # A finding may have several lines; the first names the database.
            lines = [line for finding in findings for line in str(finding).splitlines()]
            damage = [line for line in lines if line != "ok" and not line.startswith("***")][:_MOST_FINDINGS]
            is_current = connection.exec_driver_sql("PRAGMA user_version").scalar() == schema.VERSION
            return damage or (list(_find_strays(connection)) if is_current else [])
    except RegistryDamaged as error:
        return [f"SQLite cannot read it: {error.__cause__}"]


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
