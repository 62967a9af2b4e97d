"""Hashes of files, kept from one snapshot to the next: an unchanged file is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.spec.code import FILE, LINK, PROGRAM, CodeFile, CodeManifest
from slurmtrain.system.files import read_json, write_json

# A file that was changed less than this before its hash was taken may have been changed again since, within the same
# tick of its file system's clock.
_TICK_NS = 2_000_000_000
_CHUNK = 1 << 20


def hash_files(root: Path, files: Mapping[str, os.stat_result], cache: Path) -> CodeManifest:
    """The manifest of files; only files that have changed since it was made last are read.

    Args:
        root: The directory that they are below.
        files: Their paths, with their status.
        cache: Where their hashes are kept.

    Raises:
        OSError: One cannot be read.
    """
    kept, now = _load(cache), time.time_ns()
    hashed, fresh = [], {}
    for path, status in files.items():
        identity = _identity(status)
        row = kept.get(path)
        if row is not None and row[:-1] == identity:
            file = CodeFile(path, kind_of(status), str(row[-1]), status.st_size)
        else:
            try:
                file = read(root, path, status)
            except FileNotFoundError:
                continue  # deleted since it was listed
        hashed.append(file)
        if file.kind != LINK and max(status.st_mtime_ns, status.st_ctime_ns) < now - _TICK_NS:
            fresh[path] = [*identity, file.digest]
    if fresh != kept:
        with contextlib.suppress(OSError):
            write_json(cache, {"files": fresh})
    return CodeManifest.sorted(hashed)


def read(root: Path, path: str, status: os.stat_result) -> CodeFile:
    """Hash one file.

    Args:
        root: The directory that it is below.
        path: The file, relative to that.
        status: Its status.

    Raises:
        OSError: It cannot be read.
    """
    place = f"{root}/{path}"
    if stat.S_ISLNK(status.st_mode):
        return CodeFile(path, LINK, os.readlink(place), 0)  # noqa: PTH115 (fast)
    digest, size = hashlib.sha256(), 0
    with open(place, "rb", buffering=0) as file:  # noqa: PTH123 (fast)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return CodeFile(path, kind_of(status), digest.hexdigest(), size)


def kind_of(status: os.stat_result) -> str:
    """The kind of a file of a snapshot, by its status."""
    if stat.S_ISLNK(status.st_mode):
        return LINK
    return PROGRAM if status.st_mode & stat.S_IXUSR else FILE


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_mode, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _load(cache: Path) -> dict[str, list[int | str]]:
    with contextlib.suppress(PathError):
        kept = (read_json(cache) or {}).get("files")
        if isinstance(kept, dict):
            return {path: row for path, row in kept.items() if isinstance(row, list) and len(row) == 6}
    return {}
