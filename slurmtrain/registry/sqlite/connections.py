"""Connections to SQLite that say whom they wait for, and that work on a file system without locks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from slurmtrain.errors import LockHeld, PathError, RegistryFailed
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS, Waiting, describe_lockers, has_record_locks, locked

# SQLite's own wait for a lock cannot be interrupted, so it is short, and repeated.
_TRY_S = 0.1
# How long commands wait for it. Then they read the run directories instead, so that it need not be long.
LIMIT_S = 10.0
# The low byte of SQLite's extended result codes (https://sqlite.org/rescode.html).
_PRIMARY = 0xFF

READS = {"reads": True}
"""The options of a connection that only reads, and so waits only for a writer that is committing."""

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
                if waiting is None and not _can_lock(self.registry):
                    raise NoFileLocks from error
                if code != sqlite3.SQLITE_BUSY:
                    raise
                waiting = waiting or Waiting(LIMIT_S, lambda: f"the registry {self.registry}, {self._holder()}")
                if not waiting.pause():
                    held_for = LockHeld(f"the registry {self.registry}", self._holder(), LIMIT_S)
                    raise RegistryFailed(str(held_for)) from error

    def _holder(self) -> str:
        return f"held by {describe_lockers(self.registry) or 'another process, which cannot be seen from here'}"


def _can_lock(registry: Path) -> bool:
    """Whether SQLite can lock the registry, tried with another file: this process may have locked the registry."""
    try:
        return has_record_locks(lock_beside(registry))
    except PathError:
        return True  # a directory that cannot be written to: its registry is only read


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
