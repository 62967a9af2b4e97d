"""The database of an MLflow store without a server, which several runs roots, projects and accounts may share."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slurmtrain.errors import TrackingError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.files import create_private, fsync_directory, make_directory
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS, has_record_locks
from slurmtrain.system.owned_files import account_name


def store_address(file: Path, *, locks: bool = True) -> str:
    """The URL by which MLflow opens the store in a file, whose path may have any characters.

    Args:
        file: The SQLite file.
        locks: Whether its file system has locks; otherwise the store is opened without.
    """
    from sqlalchemy import URL

    # Versions of SQLAlchemy decode different parts of a URL: each reads the URLs that it has written itself.
    if locks:
        url = URL.create("sqlite", database=str(file))
    else:
        query = {"vfs": SQLITE_WITHOUT_LOCKS, "uri": "true"}
        url = URL.create("sqlite", database=f"file:{quote(str(file))}", query=query)
    return url.render_as_string(hide_password=False)


_PREFIX = "sqlite:///"
# In seconds: after a day, no draft of a store is still being made.
_LITTER_S = 86400.0
# While others migrate a store, its revision changes in less time than this.
_STEP_S = 2.0
# How long another client may take to make a store on a server, and the lock that it holds there meanwhile: a number
# that nothing else in the database uses.
_PATIENCE_S = 120
_LOCK_KEY = 0x736C75726D6D6C66
# By the texts of messages: MLflow passes on what drivers say, without their codes.
_MIGRATED = re.compile(r"out-of-date database schema|Can't locate revision")
_BROKEN = re.compile(r"not a database|malformed|already exists|no such (?:table|column)|duplicate column")
_DENIED = re.compile(r"unable to open database|readonly database|disk I/O")
_LOCKED = re.compile(r"database is locked")


def sqlite_file(uri: str) -> Path | None:
    """The file of a store; None if it is no SQLite file that has a path. ``uri``: the store's."""
    path = uri.removeprefix(_PREFIX).partition("?")[0]
    return Path(path).absolute() if uri.startswith(_PREFIX) and path and not path.startswith((":", "file:")) else None


def artifacts_of(uri: str, root: RunsRoot) -> Path | None:
    """Where a new experiment of an SQLite store keeps artifacts: beside the store, for all who share it.

    Args:
        uri: The store.
        root: The runs root.
    """
    if uri == root.mlflow_uri:
        return root.mlflow_artifacts
    file = sqlite_file(uri)
    return None if file is None else file.parent / root.mlflow_artifacts.name


def prepare(uri: str, root: RunsRoot, make: Callable[[str], object]) -> str:
    """Make a store unless it exists, and check that this MLflow can use it; returns the URI to open it by.

    The store of the runs root is opened without locks where its file system has none: whoever mirrors runs holds the
    lock of the runs root for that. Nobody has a lock there that all runs roots respect.

    Args:
        uri: The store.
        root: The runs root that sends.
        make: Makes the tables of the store with a URI.

    Raises:
        TrackingError: It cannot be used, with the way to mend it.
        OSError: Its file cannot be made.
        PathError: It is somebody else's, in the runs root.
    """
    is_own = uri == root.mlflow_uri
    file = root.mlflow_db if is_own else sqlite_file(uri)
    if file is not None:
        # In the runs root the lock's file is tried, since SQLite's file may be open.
        usable = partial(store_address, locks=not is_own or has_record_locks(root.tracking_lock))
        if not file.exists():
            _make_store(file, lambda path: make(usable(path)), is_private=is_own)
        elif is_own:
            create_private(file)
        if is_own:
            return usable(file)
    with _only_maker(uri) as makes:
        if makes:
            make(uri)
        problem = _schema_problem(uri)
    if problem:
        raise TrackingError(f"the MLflow store {uri} {problem}")
    return uri


def cure(uri: str, problem: str) -> str:
    """What to do about a store that does not work, as the end of a sentence; empty if that is not known.

    Args:
        uri: The store.
        problem: What MLflow says.
    """
    file = sqlite_file(uri)
    if _MIGRATED.search(problem):
        with contextlib.suppress(Exception):  # whatever drivers raise, the first problem is to be told
            return f": it {schema}" if (schema := _schema_problem(uri)) else ""
    if file is None:
        return ""
    if _DENIED.search(problem):
        for place in (file, file.parent):
            with contextlib.suppress(OSError):
                status = place.stat()
                if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                    return (
                        f": {place} belongs to {account_name(status.st_uid)} and has mode "
                        f"{stat.S_IMODE(status.st_mode):04o}: whoever sends runs must be able to write to {file} and "
                        "to its directory; or set mlflow_uri in slurmtrain.yaml to another store"
                    )
        return (
            f": check whether {file.parent} is full or read-only, or set mlflow_uri in slurmtrain.yaml to another store"
        )
    if _LOCKED.search(problem):
        return ": another program is keeping it locked; the next 'slurmtrain sync' tries again"
    return f": {_describe_replacing(file)}" if _BROKEN.search(problem) else ""


def _make_store(file: Path, make: Callable[[Path], object], *, is_private: bool) -> None:
    """Make a store under another name, and link it into place unless another process is faster. Raises OSError."""
    make_directory(file.parent)
    # What killed commands have left of new stores.
    for path in file.parent.glob(f".{file.name}.*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - _LITTER_S:
                path.unlink()
    draft = file.with_name(f".{file.name}.{os.urandom(8).hex()}")
    try:
        if is_private:
            create_private(draft)
        else:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            draft.chmod(_mode_in(file.parent, 0o600))
        make(draft)
        with contextlib.suppress(FileExistsError):
            # Not renamed: that would replace the store of a faster process, which others may have written to by now.
            os.link(draft, file)
        fsync_directory(file.parent)
    finally:
        for left in (draft, draft.with_name(f"{draft.name}-journal")):
            left.unlink(missing_ok=True)


def _mode_in(directory: Path, mode: int) -> int:
    """The mode of something new in a directory that others may share: whoever may replace it there may write to it."""
    shared = directory.stat().st_mode
    if shared & stat.S_ISVTX:
        return mode
    return mode | (mode >> 3 if shared & stat.S_IWGRP else 0) | (mode >> 6 if shared & stat.S_IWOTH else 0)


def make_shared(directory: Path) -> None:
    """Make a directory beside a store for all who can write to the store's; it keeps its mode if it exists."""
    with contextlib.suppress(OSError):
        directory.mkdir()
        directory.chmod(_mode_in(directory.parent, 0o700) | (directory.parent.stat().st_mode & stat.S_ISGID))


@contextlib.contextmanager
def _only_maker(uri: str) -> Iterator[bool]:
    """Whether a store on a PostgreSQL server is to be made: by this process alone, within the context.

    Raises whatever drivers of databases do.
    """
    if re.split(r"[:+]", uri)[0] != "postgresql":
        yield False
        return
    revision, has_tables = _revision(uri)
    if has_tables and not _judge_schema(uri, revision):
        yield False
        return
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    # The lock ends with the connection, also if this process is killed.
    with create_engine(uri, poolclass=NullPool).connect() as connection:
        connection.execute(text(f"SET lock_timeout = '{_PATIENCE_S}s'"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        # Asked again under the lock: whoever had it before has made the tables.
        yield not _revision(uri)[1]


def _schema_problem(uri: str) -> str:
    """Why this MLflow cannot use the tables of a store as they are, and what to do; empty if it can, or has a server.

    Raises whatever drivers of databases do.
    """
    from mlflow.store.db.db_types import DATABASE_ENGINES

    if re.split(r"[:+]", uri)[0] not in DATABASE_ENGINES:
        return ""
    revision, has_tables = _revision(uri)
    while has_tables and (problem := _judge_schema(uri, revision)):
        time.sleep(_STEP_S)
        before, (revision, has_tables) = revision, _revision(uri)
        if revision == before:
            return problem
    return ""


def _revision(uri: str) -> tuple[str | None, bool]:
    """The revision of a store's tables, None if there is none, and whether it has tables of MLflow's."""
    from sqlalchemy import create_engine, inspect, text
    from sqlalchemy.pool import NullPool

    with create_engine(uri, poolclass=NullPool).connect() as connection:
        tables = set(inspect(connection).get_table_names())
        rows: list[Any] = []
        if "alembic_version" in tables:
            rows = list(connection.execute(text("SELECT version_num FROM alembic_version")))
    return (str(rows[0][0]) if rows else None), bool(rows) or {"experiments", "runs"} <= tables


def _judge_schema(uri: str, revision: str | None) -> str:
    import mlflow
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    script = ScriptDirectory.from_config(config)
    ours = f"MLflow {mlflow.__version__} here"
    if revision in script.get_heads():
        return ""
    if revision is None:
        return "is incomplete, because a client was interrupted while making it: " + (
            _describe_replacing(file) if (file := sqlite_file(uri)) else "restore a backup, or use another database"
        )
    if revision in {each.revision for each in script.walk_revisions()}:
        return (
            f"was made by an older MLflow than {ours} (schema {revision}), and others may still use it with that: "
            f"once they have stopped and you have a backup, convert it with 'mlflow db upgrade {shlex.quote(uri)}'"
        )
    return (
        f"was converted by a newer MLflow than {ours} (schema {revision}): install that version, for example with "
        "'pip install --upgrade mlflow'"
    )


def _describe_replacing(file: Path) -> str:
    return (
        f"restore a backup of {file}, or move it away, such as with 'mv {shlex.quote(str(file))} "
        f"{shlex.quote(f'{file}.broken')}': a new one is made"
    )
