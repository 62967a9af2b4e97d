"""Upgrading a registry in place: the only user of alembic, imported only when a file is older than this version."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError

from slurmtrain.errors import RegistryUnusable
from slurmtrain.system.files import create_private, fsync_directory

MIGRATIONS = Path(__file__).with_name("migrations")


def scripts(location: Path = MIGRATIONS) -> ScriptDirectory:
    """The migrations that this version knows."""
    config = Config()
    config.set_main_option("script_location", str(location).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return ScriptDirectory.from_config(config)


def upgrade(engine: sa.Engine, path: Path, version: str, location: Path = MIGRATIONS) -> Path:
    """Copy the file beside itself, then run what is missing in one transaction; returns the copy.

    The caller holds the registry's lock. Raises RegistryUnusable for a version that is not known here.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    directory = scripts(location)
    try:
        directory.get_revision(version)
    except CommandError:
        raise RegistryUnusable(
            f"{path} was made by a newer slurmtrain (schema {version}); upgrade slurmtrain, or use another --runs"
        ) from None
    backup = _back_up(path, version)
    environment = EnvironmentContext(
        Config(), directory, fn=lambda revision, _: directory._upgrade_revs("head", revision), destination_rev="head"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment)
        connection = stack.enter_context(engine.begin())
        environment.configure(connection=connection, transactional_ddl=False, render_as_batch=True)
        environment.run_migrations()
    return backup


def _back_up(path: Path, version: str) -> Path:
    """A consistent copy of the file, made by SQLite itself."""
    backup = path.with_name(f"{path.name}.{version}.bak")
    backup.unlink(missing_ok=True)
    create_private(backup)
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    fsync_directory(path.parent)
    return backup
