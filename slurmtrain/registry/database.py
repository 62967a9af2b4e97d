"""The database that holds a registry: a SQLite file, or one in memory that takes its place while it fails."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from slurmtrain.registry.sqlite.file import engine_in_memory, open_file

__all__ = ["engine_in_memory", "open_engine", "reading"]


def open_engine(path: Path) -> sa.Engine:
    """Open the registry, creating it if there is none.

    A registry of an earlier version is emptied: the next command reads all runs again.

    Raises:
        RegistryUnusable: It is not a registry.
        RegistryFailed: It cannot be used now: somebody else holds it for too long, or its disk is full.
        PathError: It cannot be opened; UntrustedPath: It, or its directory, is somebody else's.
    """
    return open_file(path)


def reading(engine: sa.Engine) -> sa.Connection:
    """A connection that only reads, and so waits only for a writer that is committing."""
    return engine.connect().execution_options(reads=True)
