"""A new registry in place of a damaged file, from the run directories and what else can be read.

Under the lock beside the file, the new one is made first, then the old one gets another name too, then the new one its
name. A kill leaves the damaged file or the new one, and maybe an unfinished one, which the next repair overwrites.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurmtrain.errors import RegistryDamaged, RegistryFailed
from slurmtrain.model.run.layout import RunDir
from slurmtrain.registry import schema
from slurmtrain.registry.damage.unreadable import find_unreadable, is_readable
from slurmtrain.registry.dialects import insert
from slurmtrain.registry.parallel_ingest import ShowRuns, ingest_all
from slurmtrain.registry.sqlite.care import find_file_damage
from slurmtrain.registry.sqlite.connections import held, lock_beside
from slurmtrain.registry.sqlite.file import open_file
from slurmtrain.registry.sqlite.remains import Salvaged, salvage, sole_user
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system.files import describe_os_error, fsync_directory

# What SQLite may keep beside a file.
_BESIDE = ("-journal", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did with the file at ``path``.

    ``damage``: what was wrong, in sentences; empty: nothing, and nothing was done. ``kept``: where the damaged file is.
    ``runs``: how many were read. ``sent``: how many rows about trackers were taken over; ``all_sent``: those are all.
    """

    path: Path
    damage: list[str]
    kept: Path | None = None
    runs: int = 0
    sent: int = 0
    all_sent: bool = True

    def __str__(self) -> str:
        if self.kept is None:
            return f"{self.path} is intact"
        text = (
            f"the registry {self.path} was damaged ({self.damage[0]}): it has been read anew from {self.runs} run "
            f"director{'y' if self.runs == 1 else 'ies'}; the damaged file is kept as {self.kept}"
        )
        lost = "; not all that it knew about what trackers have could be read, so that some may be sent again"
        return text if self.all_sent else text + lost


def find_damage(path: Path) -> list[str]:
    """What is wrong with a registry's file or its rows, in sentences; empty if it is intact.

    Raises:
        RegistryNewer: It was made by a newer version.
        RegistryUnusable: There is none, or one of another version.
        RegistryFailed: It cannot be read now; PathError, UntrustedPath.
    """
    damage = find_file_damage(path)
    if damage:
        return damage
    engine = open_file(path, create=False)
    try:
        return find_unreadable(engine)
    except RegistryDamaged as error:  # an id that is no text
        return [f"SQLite cannot read it: {error.__cause__}"]
    finally:
        engine.dispose()


def repair(path: Path, runs: Sequence[RunDir], show: ShowRuns | None = None) -> Repaired:
    """Put a new registry in place of one that is damaged; of one that is not, nothing is changed.

    Args:
        path: The registry's file.
        runs: The run directories.
        show: Called with the progress, if given.

    Raises:
        RegistryNewer: It was made by a newer version.
        RegistryUnusable: There is none, or an intact one of another version.
        RegistryFailed: Another process has it, or it cannot be written; PathError, UntrustedPath.
    """
    new = path.with_name(f".{path.name}.repair")
    with held(lock_beside(path)):
        # Only now: another command may have replaced it meanwhile.
        damage = find_damage(path)
        if not damage:
            return Repaired(path, damage)
        try:
            _remove(new)
            _fill(new, runs, show)
            with sole_user(path) as connection:
                saved = salvage(connection, schema.sent, partial(is_readable, schema.sent))
                _add(new, saved)
                kept = _exchange(path, new)
        except OSError as error:
            raise RegistryFailed(f"cannot replace the registry {path}: {describe_os_error(error)}") from error
        finally:
            _remove(new)
    return Repaired(path, damage, kept, len(runs), len(saved.rows), saved.complete)


def _remove(new: Path) -> None:
    """Delete an unfinished registry, and what lies beside it."""
    for each in (new, *(new.with_name(new.name + suffix) for suffix in _BESIDE), lock_beside(new)):
        each.unlink(missing_ok=True)


def _fill(new: Path, runs: Sequence[RunDir], show: ShowRuns | None) -> None:
    engine = open_file(new)
    try:
        with Transaction(engine) as transaction:
            if show is None:
                ingest_all(transaction, runs)
            else:
                ingest_all(transaction, runs, show)
        faults = find_unreadable(engine)
    finally:
        engine.dispose()
    if faults:
        # Otherwise every command would put another file aside.
        raise RegistryFailed(f"a new registry is no better ({faults[0]}), which is a fault of slurmtrain; report it")


def _add(new: Path, saved: Salvaged) -> None:
    if not saved.rows:
        return
    engine = open_file(new, create=False)
    try:
        with engine.begin() as connection:
            statement = insert("sqlite", "ignore", schema.sent, tuple(schema.sent.columns.keys()))
            connection.exec_driver_sql(statement, saved.rows)
    finally:
        engine.dispose()


def _exchange(path: Path, new: Path) -> Path:
    """Give the damaged file another name and the new one its own; returns the other name."""
    old = _name_aside(path)
    # The journal first: SQLite would undo the new file's pages by it.
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(old.with_name(old.name + suffix))
    if not old.exists():
        os.link(path, old)
    new.replace(path)
    fsync_directory(path.parent)
    return old


def _name_aside(path: Path) -> Path:
    """Another name for a file: a new one, unless a repair that was killed has given it one already."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1000))
    return next(name for name in names if not os.path.lexists(name) or (name.exists() and name.samefile(path)))
