"""The database that holds a registry: a SQLite file, a schema on a PostgreSQL server, or one in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from slurmtrain.registry.sqlite import file
from slurmtrain.registry.sqlite.connections import READS

if TYPE_CHECKING:
    from slurmtrain.model.database_url import DatabaseUrl
    from slurmtrain.registry.sqlite.file import FileIdentity


def open_engine(address: Path | DatabaseUrl, *, create: bool = True) -> sa.Engine:
    """Open the registry.

    Args:
        address: Where it is.
        create: Create it if there is none. One of an earlier version is emptied: the next command reads all runs again.

    Raises:
        RegistryUnusable: It is not a registry or, without ``create``, not one of this version.
        RegistryFailed: It cannot be used now: somebody else holds it for too long, its disk is full or its server down.
        PathError: It cannot be opened; UntrustedPath: It, or its directory, is somebody else's.
    """
    if isinstance(address, Path):
        return file.open_file(address, create=create)
    from slurmtrain.registry.postgresql.server import open_server

    return open_server(address, create=create)


def engine_in_memory() -> sa.Engine:
    """A registry of this process alone, which holds nothing yet."""
    return file.engine_in_memory()


def reading(engine: sa.Engine) -> sa.Connection:
    """A connection that only reads, and so waits for no writer, except one of a SQLite file that is committing."""
    options: dict[str, Any] = READS
    if engine.dialect.name == "postgresql":
        from slurmtrain.registry.postgresql.connections import READS as OF_SERVER

        options = OF_SERVER
    return engine.connect().execution_options(**options)


def identity(address: Path | DatabaseUrl) -> FileIdentity | None:
    """Which file the registry is; None: none, or it is on a server."""
    return file.identity(address) if isinstance(address, Path) else None


def put_aside(address: Path | DatabaseUrl, suffix: str, *, only: FileIdentity | None = None) -> Path | None:
    """Make room for a new registry where one cannot be used: a file is renamed, a schema emptied.

    Args:
        address: Where it is.
        suffix: What the new name ends in.
        only: The only file that is renamed; another one may be there by now.

    Returns:
        The file's new name, if it was renamed.

    Raises:
        RegistryUnusable: A schema holds tables of others; RegistryFailed, PathError.
    """
    if isinstance(address, Path):
        return file.put_aside(address, suffix, only)
    from slurmtrain.registry.postgresql.server import start_anew

    start_anew(address)
    return None
