"""Connections to a PostgreSQL server: one writer at a time, readers that see one moment, and errors in a sentence.

A transaction that writes locks the only row of the table ``registry`` first. So writers take turns, as with a SQLite
file: what one reads, such as how far the files of a run have been read, no other changes before it commits. Readers
wait for nobody, and see all tables as they were at their first statement.
"""

from __future__ import annotations

import math
import os
import socket
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from slurmtrain.errors import ConnectionLost, LockHeld, RegistryFailed, RegistryUnusable
from slurmtrain.system.locks import Waiting

try:
    import psycopg
    from psycopg.types.numeric import FloatDumper
    from psycopg.types.string import StrDumperUnknown
except ImportError as missing:
    raise RegistryFailed(
        "the registry is on a PostgreSQL server, which needs psycopg: pip install 'slurmtrain[postgres]'"
    ) from missing

if TYPE_CHECKING:
    from slurmtrain.model.database_url import DatabaseUrl

# How long commands wait for another one that writes. Then they read the run directories instead.
LIMIT_S = 10.0
# Short enough for a person to wait for; a server that is not there usually answers at once.
CONNECT_S = 10
# A connection whose server has vanished without a word is given up after about half a minute.
_NETWORK = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
READS = {"reads": True, "isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
"""The options of a connection that only reads: it sees the tables as they were at one moment."""


class _TextDumper(StrDumperUnknown):
    """Text without NUL characters, which PostgreSQL refuses, and which journals may contain."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in obj else obj)


class _FloatDumper(FloatDumper):
    """Numbers, with NULL for what is not a number, as SQLite stores it."""

    def dump(self, obj: float) -> Any:
        return None if math.isnan(obj) else super().dump(obj)


def make_engine(url: DatabaseUrl) -> sa.Engine:
    """An engine whose transactions, unless they only read, wait for the registry's other writers first.

    Its statements raise RegistryFailed, ConnectionLost or RegistryUnusable.
    """

    def connect() -> psycopg.Connection[Any]:
        return _connect(url)

    dialect = {"use_native_hstore": False, "isolation_level": "READ COMMITTED"}
    engine = sa.create_engine("postgresql+psycopg://", creator=connect, **dialect)

    @sa.event.listens_for(engine, "handle_error")
    def _failed(context: sa.engine.ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.Error) and not isinstance(error, psycopg.errors.LockNotAvailable):
            raise _translated(url, error, is_lost=context.is_disconnect) from error

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        if not options.get("reads") and not options.get("makes_tables"):
            _wait_for_writers(connection, url)

    return engine


def _connect(url: DatabaseUrl) -> psycopg.Connection[Any]:
    """A connection. Options that libpq takes from the address or from PG* variables win over ours."""
    configured = psycopg.conninfo.conninfo_to_dict(url.text)
    own = configured.get("options", os.environ.get("PGOPTIONS", ""))
    ours: dict[str, Any] = {
        **_NETWORK,
        "connect_timeout": os.environ.get("PGCONNECT_TIMEOUT", CONNECT_S),
        "application_name": f"slurmtrain on {socket.gethostname()}, process {os.getpid()}",
        **configured,
        "client_encoding": "utf8",
        # The last of equal options counts.
        "options": f"{own} -csearch_path={url.schema} -clock_timeout={LIMIT_S:.0f}s".strip(),
    }
    connection = psycopg.connect(**ours)
    connection.adapters.register_dumper(str, _TextDumper)
    connection.adapters.register_dumper(float, _FloatDumper)
    return connection


def _wait_for_writers(connection: sa.Connection, url: DatabaseUrl) -> None:
    waiting: Waiting | None = None
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    while True:
        try:
            connection.exec_driver_sql("SELECT version FROM registry FOR UPDATE NOWAIT")
            return
        except sa.exc.OperationalError as error:  # only that the row is locked: other errors are translated
            driver.rollback()
            waiting = waiting or Waiting(LIMIT_S, lambda: f"the registry {url}, {_holder(driver)}")
            if not waiting.pause():
                raise RegistryFailed(str(LockHeld(f"the registry {url}", _holder(driver), LIMIT_S))) from error


def _holder(driver: psycopg.Connection[Any]) -> str:
    """Who writes to the registry now."""
    holders = driver.execute(
        "SELECT DISTINCT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE relation = 'registry'::regclass AND mode = 'RowShareLock' AND pid <> pg_backend_pid()"
    ).fetchall()
    driver.rollback()
    return "held by " + (", ".join(sorted(name for (name,) in holders if name)) or "another session of the server")


def _translated(url: DatabaseUrl, error: psycopg.Error, *, is_lost: bool) -> Exception:
    """An error of the server or its driver as one of ours, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if url.password:
        text = text.replace(url.password, "***")
    if isinstance(error, psycopg.DataError):
        return ValueError(f"PostgreSQL cannot store a value: {text}")
    if isinstance(error, psycopg.IntegrityError):
        return RegistryUnusable(f"the registry {url} contradicts itself: {text}; run 'slurmtrain registry rebuild'")
    if is_lost:
        return ConnectionLost(f"the connection to the registry {url} was lost: {text}")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return RegistryFailed(
            f"the registry {url} cannot be used: {text}; its schema is {url.schema}, which your role must own"
        )
    return RegistryFailed(f"the registry {url} cannot be used: {text}")
