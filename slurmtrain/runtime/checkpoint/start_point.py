"""A run's own copy of the checkpoint that it begins with, which another run has saved.

Files of slurmtrain's checkpoints never change, so the copy consists of hard links: they take no space, and the other
run's pruning or deletion leaves them alone. Scripts may overwrite their checkpoints' files, so these are copied.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.runtime.checkpoint.files import published, read_manifest, verify
from slurmtrain.system.files import FILE_MODE, fsync, fsync_directory, make_directory


def start_point(run: RunDir) -> Path | None:
    """The checkpoint of slurmtrain's format that a run begins with; None if there is none."""
    return next(iter(published(run.start)), None)


def link_checkpoint(source: Path, run: RunDir) -> None:
    """Let a run begin with a checkpoint of slurmtrain's format. Its sizes are checked now, its hashes when it is read.

    Args:
        source: the published checkpoint of another run, which may be pruned meanwhile.
        run: a run that has not begun.

    Raises:
        CheckpointError: it is damaged.
        FileNotFoundError: it has been pruned.
        OSError: it cannot be linked or copied.
    """
    manifest = read_manifest(source)
    verify(source, manifest, manifest.files, hashes=False)
    place = make_directory(make_directory(run.start, private=True) / source.name, private=True)
    # The manifest last: without it there is no checkpoint.
    for name in (*sorted(manifest.files), MANIFEST):
        _link(source / name, place / name)
    fsync_directory(place)
    fsync_directory(run.start)


def copy_checkpoint(source: Path, run: RunDir) -> None:
    """Let a run begin with a checkpoint that a script has written.

    Args:
        source: a file or directory.
        run: a run that has not begun.

    Raises OSError.
    """
    place = make_directory(run.start, private=True) / source.name
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True)
    else:
        shutil.copy2(source, place)
    fsync_directory(run.start)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, one without hard links, or somebody else's file (proc(5), protected_hardlinks).
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with source.open("rb") as file, os.fdopen(handle, "wb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            fsync(copy.fileno())
