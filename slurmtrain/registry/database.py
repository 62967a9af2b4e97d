"""The SQLite file: made on first use, upgraded in place, refused when it is not ours or newer than this version."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from slurmtrain.errors import PlaceError, RegistryUnusable
from slurmtrain.registry import schema
from slurmtrain.system.files import create_private, describe_os_error, locked, make_directory

# Rollback journal and full synchronisation work on network filesystems too; write-ahead logging does not.
_PRAGMAS = ("PRAGMA journal_mode=DELETE", "PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON")
_BUSY_S = 60.0


def open_engine(path: Path) -> sa.Engine:
    """Open the registry, making or upgrading it first. Raises RegistryUnusable or PlaceError."""
    engine = _engine(path)
    version = _version(engine, path) if path.exists() else None
    if version != schema.HEAD:
        _bring_up_to_date(engine, path)
    return engine


def _engine(path: Path) -> sa.Engine:
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": _BUSY_S})

    @sa.event.listens_for(engine, "handle_error")
    def _failed(context: sa.engine.ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, sqlite3.OperationalError):
            raise PlaceError(
                f"the registry {path} cannot be used: {error}; try again, or look at its directory"
            ) from error
        if isinstance(error, sqlite3.DatabaseError):
            raise RegistryUnusable(f"{path} is no database that can be read ({error}); {_advice(path)}") from error

    # SQLAlchemy's recipe for SQLite transactions that begin when they are told to, and write-locked.
    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        for pragma in _PRAGMAS:
            connection.execute(pragma)

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def reading(engine: sa.Engine) -> sa.Connection:
    """A connection that only reads, and so waits for nobody but a writer that is committing."""
    return engine.connect().execution_options(reads=True)


def _version(engine: sa.Engine, path: Path) -> str | None:
    """The migration that the file is at; None for an empty file."""
    with reading(engine) as connection:
        tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type='table'").scalars())
        if not tables:
            return None
        if "alembic_version" not in tables or "run" not in tables:
            raise RegistryUnusable(f"{path} is a database, but not a registry of slurmtrain; {_advice(path)}")
        version: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        return version


def _advice(path: Path) -> str:
    return f"'slurmtrain registry rebuild' makes a new one and keeps this file as {path.name}.old"


def _bring_up_to_date(engine: sa.Engine, path: Path) -> None:
    make_directory(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        try:
            create_private(path)
        except OSError as error:
            raise PlaceError(f"cannot write the registry {path}: {describe_os_error(error)}") from error
        version = _version(engine, path)
        if version is None:
            with engine.begin() as connection:
                schema.metadata.create_all(connection)
                connection.execute(schema.alembic_version.insert().values(version_num=schema.HEAD))
        elif version != schema.HEAD:
            from slurmtrain.registry.upgrade import upgrade

            upgrade(engine, path, version)
