"""A registry on a PostgreSQL server: one writer at a time, readers that see one moment, and errors in a sentence.

A transaction that writes locks the only row of the table ``registry`` first. So writers take turns, as with a SQLite
file: what one reads, such as how far the files of a run have been read, no other changes before it commits. Readers
wait for nobody, and see all tables as they were at their first statement.

Each runs root has a schema of its own: made on first use, emptied if its version is older. It is refused if it is
newer, has tables of others, belongs to another role, or holds the runs of another root.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from slurmtrain.errors import ConnectionLost, LockHeld, RegistryFailed, RegistryNewer, RegistryUnusable
from slurmtrain.registry import schema
from slurmtrain.registry.schema import TEXT
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
    from slurmtrain.model.urls import DatabaseUrl

# How long commands wait for another one that writes. Then they read the run directories instead.
LIMIT_S = 10.0
# Short enough for a person to wait for; a server that is not there usually answers at once.
CONNECT_S = 10
# A connection whose server has vanished without a word is given up after about half a minute.
_NETWORK = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
READS = {"reads": True, "isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
"""The options of a connection that only reads: it sees the tables as they were at one moment."""

# The oldest version of PostgreSQL that is supported, as the server reports it.
OLDEST = 12_00_00

# One row, which writers lock.
_registry = sa.Table(
    "registry", sa.MetaData(), sa.Column("version", sa.Integer, nullable=False), sa.Column("root", TEXT, nullable=False)
)


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
    def translate(context: sa.engine.ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.Error) and not isinstance(error, psycopg.errors.LockNotAvailable):
            raise _server_error(url, error, is_lost=context.is_disconnect) from error

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        if options.get("reads") or options.get("makes_tables"):
            return
        waiting: Waiting | None = None
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        while True:
            try:
                # The server would wait without saying for whom, and Ctrl-C would only end the process after the wait.
                connection.exec_driver_sql("SELECT version FROM registry FOR UPDATE NOWAIT")
                return
            except sa.exc.OperationalError as error:  # only that the row is locked: other errors are translated
                driver.rollback()
                waiting = waiting or Waiting(LIMIT_S, lambda: f"the registry {url}, {_writer(driver)}")
                if not waiting.pause():
                    raise RegistryFailed(str(LockHeld(f"the registry {url}", _writer(driver), LIMIT_S))) from error

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


def _writer(driver: psycopg.Connection[Any]) -> str:
    """Who writes to the registry now."""
    holders = driver.execute(
        "SELECT DISTINCT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE relation = 'registry'::regclass AND mode = 'RowShareLock' AND pid <> pg_backend_pid()"
    ).fetchall()
    driver.rollback()
    return "held by " + (", ".join(sorted(name for (name,) in holders if name)) or "another session of the server")


def _server_error(url: DatabaseUrl, error: psycopg.Error, *, is_lost: bool) -> Exception:
    """An error of the server or its driver as one of ours, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    # libpq repeats the address in some of its messages.
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


# --- the schema -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Schema:
    """What is in a schema: its tables and, where it is a registry, its version and runs root."""

    tables: Collection[str]
    version: int | None
    root: Path | None


def open_server(url: DatabaseUrl) -> sa.Engine:
    """Open the registry on a server; its schema is created if there is none, and emptied if of an earlier version.

    Args:
        url: The registry.

    Raises:
        RegistryUnusable: The schema holds other tables, or the runs of another root.
        RegistryNewer: It was made by a newer version.
        RegistryFailed: The server cannot be used now, or does not let this role in.
    """
    engine = make_engine(url)
    with engine.connect().execution_options(**READS) as connection:
        server = connection.connection.driver_connection
        assert isinstance(server, psycopg.Connection)
        if server.info.server_version < OLDEST:
            of_server = server.info.parameter_status("server_version")
            raise RegistryFailed(
                f"the registry {url} is on PostgreSQL {of_server}; it needs {OLDEST // 10_000} or newer"
            )
        # Its database must hold every text.
        if (encoding := server.info.parameter_status("server_encoding")) != "UTF8":
            raise RegistryFailed(
                f"the database of the registry {url} has the encoding {encoding}; make one with CREATE DATABASE ... "
                "ENCODING 'UTF8' TEMPLATE template0"
            )
        present = _read_schema(connection, url)
    if present is not None:
        _check_schema(present, url)
    if present is None or present.version != schema.VERSION:
        _make_schema(engine, url)
    return engine


def start_anew(url: DatabaseUrl) -> None:
    """Empty the registry, whatever version or runs root it is of.

    Raises RegistryUnusable if there are other tables in its schema, RegistryFailed as :func:`open_server` does.
    """
    engine = make_engine(url)
    try:
        _make_schema(engine, url, always=True)
    finally:
        engine.dispose()


def _read_schema(connection: sa.Connection, url: DatabaseUrl) -> _Schema | None:
    """What is in the schema; None if it does not exist. Raises RegistryFailed if it is somebody else's."""
    # What a registry says decides which processes and jobs are ended, so that its owner must be as trustworthy as the
    # owner of a file (slurmtrain.system.owned_files).
    row = connection.execute(
        sa.text(
            "SELECT pg_get_userbyid(nspowner), pg_has_role(nspowner, 'USAGE') OR rolsuper, current_user,"
            " ARRAY(SELECT relname::text FROM pg_class"
            " WHERE relnamespace = pg_namespace.oid AND relkind IN ('r', 'p', 'v', 'm', 'f'))"
            " FROM pg_namespace JOIN pg_roles ON pg_roles.oid = nspowner WHERE nspname = :schema"
        ),
        {"schema": url.schema},
    ).one_or_none()
    if row is None:
        return None
    owner, is_trusted, user, tables = row
    if not is_trusted:
        raise RegistryFailed(
            f"the schema {url.schema} of the registry {url} belongs to the role {owner}, and {user} is not a member "
            "of it; name a schema of your own with '?options=-csearch_path=NAME'"
        )
    if _registry.name not in tables:
        return _Schema(tables, None, None)
    version, root = connection.execute(sa.select(_registry)).one()
    return _Schema(tables, version, Path(root))


def _check_schema(present: _Schema, url: DatabaseUrl) -> None:
    """Raise RegistryUnusable unless the schema is empty, or a registry of the runs root that can be used."""
    other_schema = "name another one with '?options=-csearch_path=NAME'"
    if present.version is None:
        if present.tables:
            raise RegistryUnusable(f"the schema {url.schema} in {url} holds other tables; {other_schema}")
        return
    if present.version > schema.VERSION:
        raise RegistryNewer(
            f"the registry {url} was made by a newer slurmtrain (schema {present.version}); upgrade slurmtrain, or use "
            "another --runs"
        )
    if present.root != url.root:
        raise RegistryUnusable(
            f"the schema {url.schema} in {url} holds the runs in {present.root}; {other_schema} or, if they are in "
            f"{url.root} now, run 'slurmtrain registry rebuild'"
        )


def _make_schema(engine: sa.Engine, url: DatabaseUrl, *, always: bool = False) -> None:
    """Make the tables, in one transaction: a kill leaves either the old or the new ones.

    Args:
        engine: The engine of the server.
        url: The registry.
        always: Also replace the tables of this version, of a newer one, or of another root.
    """
    with engine.connect().execution_options(makes_tables=True) as connection, connection.begin():
        # Another command may do the same, and CREATE SCHEMA would fail where it has not committed.
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext(:schema))"), {"schema": url.schema})
        present = _read_schema(connection, url)
        if present is None:
            connection.execute(sa.schema.CreateSchema(url.schema))
            present = _Schema((), None, None)
        if not always or present.version is None:
            _check_schema(present, url)
        # Another command may have made them while this one waited for the lock.
        if present.version != schema.VERSION or always:
            schema.replace_tables(connection, set(present.tables) - {_registry.name})
            _registry.create(connection, checkfirst=True)
            connection.execute(_registry.delete())
            connection.execute(_registry.insert(), {"version": schema.VERSION, "root": str(url.root)})
