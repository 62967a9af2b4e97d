"""A registry in a SQLite file: connections that say whom they wait for, also on a file system without locks.

The file is created on first use, emptied if its version is older, and refused if it is newer or not a registry. While
it fails, a database in memory takes its place (:class:`~slurmtrain.registry.store.Spare`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from slurmtrain.errors import (
    ConnectionLost,
    LockHeld,
    PathError,
    RegistryDamaged,
    RegistryFailed,
    RegistryNewer,
    RegistryUnusable,
)
from slurmtrain.registry import schema
from slurmtrain.system.files import create_private, describe_os_error, fsync_directory, make_directory
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS, Waiting, describe_lockers, has_record_locks, locked
from slurmtrain.system.owned_files import check_entry

# SQLite's own wait for a lock cannot be interrupted, so it is short, and repeated.
_TRY_S = 0.1
# How long commands wait for it. Then they read the run directories instead, so that it need not be long.
LIMIT_S = 10.0
# The low byte of SQLite's extended result codes (https://sqlite.org/rescode.html).
_PRIMARY = 0xFF

READS = {"reads": True}
"""The options of a connection that only reads, and so waits only for a writer that is committing."""

# A rollback journal with full synchronisation also works on network file systems; write-ahead logging does not.
_PRAGMAS = ("PRAGMA journal_mode=DELETE", "PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON")
# Without it, SQLite reads nothing of a file that is shorter than its header has it (lockBtree() in its btree.c).
_LENIENT = "PRAGMA writable_schema=ON"

FileIdentity = tuple[int, int]
"""The device and the inode of a file."""

T = TypeVar("T")


class NoFileLocks(Exception):
    """SQLite cannot lock the registry, because its file system has no locks."""


class _PatientCursor(sqlite3.Cursor):
    """A cursor that repeats a statement while another process keeps it from the database: it has done nothing then."""

    connection: _PatientConnection

    def execute(self, *arguments: Any) -> Self:
        return self.connection.repeat(partial(super().execute, *arguments))

    def executemany(self, *arguments: Any) -> Self:
        return self.connection.repeat(partial(super().executemany, *arguments))


class _PatientConnection(sqlite3.Connection):
    """A connection to the registry that waits for its lock, though not for ever."""

    registry: Path

    def cursor(self, *_: Any) -> sqlite3.Cursor:  # type: ignore[override]
        return super().cursor(_PatientCursor)

    def commit(self) -> None:
        # A commit that waits for readers leaves its transaction open, and can be repeated.
        self.repeat(super().commit)

    def repeat(self, action: Callable[[], T]) -> T:
        """Do something until the database is not locked any more. Raises RegistryFailed, NoFileLocks."""
        waiting: Waiting | None = None
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & _PRIMARY
                if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR):
                    raise
                # SQLite takes ENOLCK for a lock that another process has, and other errors for a failing disk.
                if waiting is None:
                    # Another file shows whether there are locks: this process may have locked the registry. Without
                    # another one, in a directory that cannot be written to, the registry is only read.
                    with contextlib.suppress(PathError):
                        if not has_record_locks(lock_beside(self.registry)):
                            raise NoFileLocks from error
                if code != sqlite3.SQLITE_BUSY:
                    raise
                waiting = waiting or Waiting(LIMIT_S, lambda: f"the registry {self.registry}, {self._holder()}")
                if not waiting.pause():
                    held_for = LockHeld(f"the registry {self.registry}", self._holder(), LIMIT_S)
                    raise RegistryFailed(str(held_for)) from error

    def _holder(self) -> str:
        return f"held by {describe_lockers(self.registry) or 'another process, which cannot be seen from here'}"


def lock_beside(registry: Path) -> Path:
    """The lock held by whoever makes, replaces or moves the registry."""
    return registry.with_name(f".{registry.name}.lock")


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold a ``lock`` of ours that is about the registry. Raises RegistryFailed if another process has it too long."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, limit_s=LIMIT_S))
        except LockHeld as error:
            raise RegistryFailed(str(error)) from error
        yield


def patient_engine(registry: Path) -> sa.Engine:
    """An engine that waits for SQLite's lock.

    Its connections raise RegistryFailed if that takes too long, and NoFileLocks where SQLite's locks do not work.
    """

    def connect(*arguments: Any, **more: Any) -> sqlite3.Connection:
        connection = _PatientConnection(*arguments, **more)
        connection.registry = registry
        return connection

    url = sa.URL.create("sqlite", database=str(registry))
    return sa.create_engine(url, connect_args={"timeout": _TRY_S, "factory": connect})


def exclusive_engine(registry: Path) -> sa.Engine:
    """An engine for a file system without locks: a lock of ours is held, even to read, as long as a connection is open.

    It raises RegistryFailed if another process has that lock for too long.
    """
    lock = _LockInUse(registry.with_name(f".{registry.name}.use.lock"))

    def connect(*arguments: Any, **more: Any) -> sqlite3.Connection:
        # Before SQLite opens the file: a journal beside it would belong to a transaction in progress.
        lock.enter()
        connection = _ExclusiveConnection(*arguments, **more)
        connection.lock = lock
        return connection

    url = sa.URL.create(
        "sqlite", database=f"file:{quote(str(registry))}", query={"vfs": SQLITE_WITHOUT_LOCKS, "uri": "true"}
    )
    return sa.create_engine(url, connect_args={"factory": connect}, poolclass=sa.NullPool)


class _LockInUse:
    """A lock that this process holds as long as any connection of an engine is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = ExitStack()
        self._users = 0

    def enter(self) -> None:
        if not self._users:
            self._held.enter_context(held(self._path))
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._held.close()


class _ExclusiveConnection(sqlite3.Connection):
    """A connection that is closed before its lock is released."""

    lock: _LockInUse

    def close(self) -> None:
        super().close()
        self.lock.leave()


# --- the file ---------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> sa.Engine:
    """Open the registry's file, which is created if there is none.

    One of an earlier version is emptied: the next command reads all runs again.

    Args:
        path: The file.

    Raises:
        RegistryUnusable: The file is not a registry.
        RegistryDamaged: It is one, and damaged.
        RegistryFailed: It cannot be used now: somebody else holds it for too long, or its disk is full.
        PathError: It cannot be opened; UntrustedPath: It, or its directory, is somebody else's.
    """
    try:
        return _open_with(_with_events(patient_engine(path), path), path)
    except NoFileLocks:
        return _open_with(_with_events(exclusive_engine(path), path), path)


def _open_with(engine: sa.Engine, path: Path) -> sa.Engine:
    try:
        if _exists(path) and _tables_version(engine, path) == schema.VERSION:
            return engine
    except RegistryDamaged as error:
        # Only a registry of ours is replaced without a word from the user.
        if _was_registry(path):
            raise
        cause = error.__cause__
        raise RegistryUnusable(f"{path} is not a readable database ({cause}); {_rebuild_advice(path)}") from cause
    make_directory(path.parent)
    with held(lock_beside(path)):
        try:
            create_private(path)
        except OSError as error:
            raise RegistryFailed(f"cannot write the registry {path}: {describe_os_error(error)}") from error
        # Another command may have made the tables since.
        if _tables_version(engine, path) != schema.VERSION:
            _make_tables(engine)
    return engine


def _exists(path: Path) -> bool:
    """Whether there is a file. Raises PathError; UntrustedPath if it, or its directory, is somebody else's.

    The directory matters as much: SQLite takes a journal that lies next to the file for a transaction that it has to
    undo.
    """
    try:
        check_entry(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PathError(f"the registry {path} cannot be used: {describe_os_error(error)}") from error
    return True


def engine_in_memory() -> sa.Engine:
    """A registry of this process alone, which holds nothing yet."""
    # One connection: each further one would see an empty database of its own.
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    _begin_explicitly(engine)
    _make_tables(engine)
    return engine


def _with_events(engine: sa.Engine, path: Path) -> sa.Engine:
    _begin_explicitly(engine)

    @sa.event.listens_for(engine, "handle_error")
    def translate(context: sa.engine.ExceptionContext) -> None:
        error = context.original_exception
        if not isinstance(error, sqlite3.DatabaseError):
            return
        # The driver reports text that is not UTF-8 like a failing disk, but without a code of SQLite.
        if not isinstance(error, sqlite3.OperationalError) or str(error).startswith("Could not decode to UTF-8"):
            cure = "'slurmtrain registry rebuild' replaces it"
            raise RegistryDamaged(f"the registry {path} is damaged ({error}); {cure}") from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED:
            raise ConnectionLost(f"the registry {path} was replaced or deleted") from error
        cure = f"free some space in {path.parent}" if "full" in str(error) else f"look at {path.parent}"
        cure += ", or set 'registry' in slurmtrain.yaml to a file elsewhere"
        raise RegistryFailed(f"the registry {path} cannot be used: {error}; {cure}") from error

    return engine


def _begin_explicitly(engine: sa.Engine) -> None:
    """SQLAlchemy's recipe for SQLite transactions that begin explicitly, and with the write lock."""

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        try:
            for pragma in _PRAGMAS:
                connection.cursor().execute(pragma)
        except BaseException:
            connection.close()  # otherwise it keeps its lock, where there is one of ours
            raise

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _was_registry(path: Path) -> bool:
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


def _tables_version(engine: sa.Engine, path: Path) -> int | None:
    """The version of the tables; None for an empty file. Raises RegistryUnusable if newer, or not a registry."""
    with engine.connect().execution_options(**READS) as connection:
        tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type='table'").scalars())
        # The first version of the tables was marked differently, and has 0 here.
        version = int(connection.exec_driver_sql("PRAGMA user_version").scalar() or 0)
    if not tables:
        return None
    if not schema.is_registry(tables):
        raise RegistryUnusable(f"{path} is a database, but not a registry of slurmtrain; {_rebuild_advice(path)}")
    if version > schema.VERSION:
        raise RegistryNewer(
            f"{path} was made by a newer slurmtrain (schema {version}); upgrade slurmtrain, or use another --runs"
        )
    return version


def _rebuild_advice(path: Path) -> str:
    return f"'slurmtrain registry rebuild' makes a new one, and keeps this file as {path.name}.old"


def _make_tables(engine: sa.Engine) -> None:
    """Replace the tables of an earlier version in one transaction: a kill leaves either the old or the new ones."""
    with engine.begin() as connection:
        tables = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type='table'").scalars().all()
        schema.replace_tables(connection, tables)
        connection.exec_driver_sql(f"PRAGMA user_version = {schema.VERSION}")


def device_and_inode(path: Path) -> FileIdentity | None:
    """Which file has this name now; None: none that can be seen."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def put_file_aside(path: Path, suffix: str, only: FileIdentity | None = None) -> Path | None:
    """Rename a file and its journal, so that a new one can take its place; returns the new name.

    Args:
        path: The file.
        suffix: What the new name ends in; a number follows if there is such a file.
        only: The only file that is renamed; None: any. Another command may have made a new one.

    Raises:
        RegistryFailed: It cannot be renamed, or another process holds its lock.
    """
    with held(lock_beside(path)):
        if only not in (None, device_and_inode(path)):
            return None
        names = (path.with_name(f"{path.name}.{suffix}{number or ''}") for number in itertools.count())
        kept = next(name for name in names if not os.path.lexists(name))
        try:
            # The journal first: SQLite would undo the new file's pages by it.
            for each in ("-journal", ""):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + each).replace(kept.with_name(kept.name + each))
            fsync_directory(path.parent)
        except OSError as error:
            raise RegistryFailed(f"cannot rename the registry {path}: {describe_os_error(error)}") from error
    return kept
