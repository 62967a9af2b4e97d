"""The schema of a runs root on a PostgreSQL server: made on first use, emptied if its version is older.

It is refused if it is newer, has tables of others, belongs to another role, or holds the runs of another root.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from slurmtrain.errors import RegistryFailed, RegistryNewer, RegistryUnusable
from slurmtrain.registry import schema
from slurmtrain.registry.dialects import TEXT
from slurmtrain.registry.postgresql.connections import READS, make_engine

if TYPE_CHECKING:
    from slurmtrain.model.database_url import DatabaseUrl

# The oldest version of PostgreSQL that is supported, as the server reports it.
OLDEST = 12_00_00

# One row, which writers lock.
_registry = sa.Table(
    "registry",
    sa.MetaData(),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("root", TEXT, nullable=False),
)


@dataclass(frozen=True, slots=True)
class _Schema:
    """What is in a schema: its tables and, where it is a registry, its version and runs root."""

    tables: Collection[str]
    version: int | None
    root: Path | None


def open_server(url: DatabaseUrl, *, create: bool = True) -> sa.Engine:
    """Open the registry on a server.

    Args:
        url: The registry.
        create: Create its schema if there is none, and empty one of an earlier version.

    Raises:
        RegistryUnusable: The schema holds other tables, or the runs of another root; without ``create``, it is not of
            this version.
        RegistryNewer: It was made by a newer version.
        RegistryFailed: The server cannot be used now, or does not let this role in.
    """
    engine = make_engine(url)
    with engine.connect().execution_options(**READS) as connection:
        _check_server(connection, url)
        present = _read(connection, url)
    if present is not None:
        _check(present, url)
    version = None if present is None else present.version
    if version == schema.VERSION:
        return engine
    if not create:
        raise schema.not_of_this_version(f"{url}, in the schema {url.schema}", version)
    _make(engine, url)
    return engine


def start_anew(url: DatabaseUrl) -> None:
    """Empty the registry, whatever version or runs root it is of.

    Raises RegistryUnusable if there are other tables in its schema, RegistryFailed as :func:`open_server` does.
    """
    engine = make_engine(url)
    try:
        _make(engine, url, always=True)
    finally:
        engine.dispose()


def _check_server(connection: sa.Connection, url: DatabaseUrl) -> None:
    """Raise RegistryFailed if the server is too old, or its database cannot hold every text."""
    server = connection.connection.driver_connection
    assert server is not None
    if server.info.server_version < OLDEST:
        version = server.info.parameter_status("server_version")
        raise RegistryFailed(f"the registry {url} is on PostgreSQL {version}; it needs {OLDEST // 10_000} or newer")
    encoding = server.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise RegistryFailed(
            f"the database of the registry {url} has the encoding {encoding}; make one with CREATE DATABASE ... "
            "ENCODING 'UTF8' TEMPLATE template0"
        )


def _read(connection: sa.Connection, url: DatabaseUrl) -> _Schema | None:
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
            f"the schema {url.schema} of the registry {url} belongs to the role {owner}, and {user} is no member of "
            "it; name a schema of your own with '?options=-csearch_path=NAME'"
        )
    if _registry.name not in tables:
        return _Schema(tables, None, None)
    version, root = connection.execute(sa.select(_registry)).one()
    return _Schema(tables, version, Path(root))


def _check(present: _Schema, url: DatabaseUrl) -> None:
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


def _make(engine: sa.Engine, url: DatabaseUrl, *, always: bool = False) -> None:
    """Make the tables, in one transaction: a kill leaves either the old or the new ones.

    Args:
        engine: The engine of the server.
        url: The registry.
        always: Also replace the tables of this version, of a newer one, or of another root.
    """
    with engine.connect().execution_options(makes_tables=True) as connection, connection.begin():
        # Another command may do the same, and CREATE SCHEMA would fail where it has not committed.
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext(:schema))"), {"schema": url.schema})
        present = _read(connection, url)
        if present is None:
            connection.execute(sa.schema.CreateSchema(url.schema))
            present = _Schema((), None, None)
        if not always or present.version is None:
            _check(present, url)
        if present.version != schema.VERSION or always:
            schema.replace_tables(connection, set(present.tables) - {_registry.name})
            _registry.create(connection, checkfirst=True)
            connection.execute(_registry.delete())
            connection.execute(_registry.insert(), {"version": schema.VERSION, "root": str(url.root)})
