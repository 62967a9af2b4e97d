"""Taking a snapshot: its manifest and the contents of its files, stored once for the same content.

A snapshot is a directory, which is built under another name and renamed. What a killed command leaves is removed by the
next one that stores anything, a day later.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.code import FILE, LINK, PROGRAM, CodeFile, CodeManifest, CodeSnapshot
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.code.packages import find_editable
from slurmtrain.snapshots.selection import CodeSelection, CodeSource, revisions, select_code
from slurmtrain.system.files import describe_os_error, fsync_directory, make_directory, read_json, write_json
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import open_checked, read_checked

# --- hashes of files, kept from one snapshot to the next: an unchanged file is not read again -------------------------

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
    kept: dict[str, list[int | str]] = {}
    with contextlib.suppress(PathError):
        rows = (read_json(cache) or {}).get("files")
        if isinstance(rows, dict):
            kept = {path: row for path, row in rows.items() if isinstance(row, list) and len(row) == 6}
    now = time.time_ns()
    hashed, fresh = [], {}
    for path, status in files.items():
        identity = [status.st_mode, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        row = kept.get(path)
        if row is not None and row[:-1] == identity:
            file = CodeFile(path, code_kind(status), str(row[-1]), status.st_size)
        else:
            try:
                file = hash_one(root, path, status)
            except FileNotFoundError:
                continue  # deleted since it was listed
        hashed.append(file)
        if file.kind != LINK and max(status.st_mtime_ns, status.st_ctime_ns) < now - _TICK_NS:
            fresh[path] = [*identity, file.digest]
    if fresh != kept:
        with contextlib.suppress(OSError):
            write_json(cache, {"files": fresh})
    return CodeManifest.sorted(hashed)


def hash_one(root: Path, path: str, status: os.stat_result, copy: gzip.GzipFile | None = None) -> CodeFile:
    """Hash one file.

    Args:
        root: The directory that it is below.
        path: The file, relative to that.
        status: Its status.
        copy: Receives its content.

    Raises:
        OSError: It cannot be read, or copied.
    """
    place = f"{root}/{path}"
    if stat.S_ISLNK(status.st_mode):
        return CodeFile(path, LINK, os.readlink(place), 0)  # noqa: PTH115 (fast)
    digest, size = hashlib.sha256(), 0
    with open(place, "rb", buffering=0) as file:  # noqa: PTH123 (fast)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if copy is not None:
                copy.write(chunk)
    return CodeFile(path, code_kind(status), digest.hexdigest(), size)


def code_kind(status: os.stat_result) -> str:
    """The kind of a file of a snapshot, by its status."""
    if stat.S_ISLNK(status.st_mode):
        return LINK
    return PROGRAM if status.st_mode & stat.S_IXUSR else FILE


# --- taking a snapshot ------------------------------------------------------------------------------------------------

# No submission takes a day to store a snapshot, so what is older belongs to a killed one.
_LITTER_S = 86400.0
_READ_ONLY = 0o400
# A gzip file ends with how many bytes it stands for (RFC 1952).
_ISIZE = 4


def take(root: RunsRoot, source: CodeSource, python: Path) -> tuple[CodeSnapshot, list[str]]:
    """Take a snapshot of the code in a working directory; returns its record for plans, and notes for the user.

    Args:
        root: Where it is stored.
        source: The source of the snapshot.
        python: The ``python`` of the command, whose installed packages are looked at.

    Raises:
        NoSnapshot: There is too much, or it is not a project's.
        UserError: The code is in a state that cannot be meant.
        PathError: It cannot be read or stored.
    """
    selection = select_code(source, root.path)
    editable = find_editable(python, selection.root)
    try:
        manifest = _store_files(root, selection)
    except OSError as error:
        place = error.filename or root.snapshots
        raise PathError(f"cannot take a snapshot of {selection.root}: {place}: {describe_os_error(error)}") from error
    snapshot = CodeSnapshot(
        hash=manifest.hash,
        root=str(selection.root),
        files=len(manifest.files),
        bytes=manifest.size,
        import_roots=editable.import_roots,
        beside=selection.beside,
        revisions=tuple(revisions(selection.root, selection.repositories)),
    )
    return snapshot, [*selection.notes, *editable.notes]


def preview_snapshot(root: RunsRoot, source: CodeSource, python: Path) -> tuple[CodeSnapshot, list[str]]:
    """What :func:`take` would take, without a hash: no file is read or written.

    Args:
        root: Where runs are.
        source: What a snapshot is to be taken of.
        python: As for :func:`take`, which raises the same errors.
    """
    selection = select_code(source, root.path)
    editable = find_editable(python, selection.root)
    snapshot = CodeSnapshot(
        hash="",
        root=str(selection.root),
        files=len(selection.files),
        bytes=sum(status.st_size for status in selection.files.values() if code_kind(status) != LINK),
        import_roots=editable.import_roots,
        beside=selection.beside,
    )
    return snapshot, [*selection.notes, *editable.notes]


def _store_files(root: RunsRoot, selection: CodeSelection) -> CodeManifest:
    """Store the files of a selection unless that has been done. Raises OSError."""
    make_directory(root.snapshots, private=True)
    key = hashlib.sha256(os.fsencode(selection.root)).hexdigest()[:16]
    manifest = hash_files(selection.root, selection.files, root.snapshots / f"hashes-{key}.json")
    stored = root.snapshot(manifest.hash)
    with locked(root.snapshots_lock), contextlib.suppress(FileNotFoundError):
        # The present time tells 'clean' that it is needed.
        os.utime(stored.path)
        with contextlib.suppress(OSError):
            # Only its ends are looked at: a job that makes a copy reads all of it.
            if read_checked(stored.manifest) == manifest.to_bytes():
                with os.fdopen(open_checked(stored.contents), "rb") as contents:
                    contents.seek(-_ISIZE, os.SEEK_END)
                    if int.from_bytes(contents.read(), "little") == manifest.size % (1 << 8 * _ISIZE):
                        return manifest
        # A damaged one makes room for what replaces it.
        stored.path.rename(root.snapshots / f".old-{os.urandom(8).hex()}")
    # What commands that were killed have left half-written.
    for path in (*root.snapshots.glob(".new-*"), *root.snapshots.glob(".old-*")):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - _LITTER_S:
                shutil.rmtree(path, ignore_errors=True)
    unborn = root.snapshots / f".new-{os.urandom(8).hex()}"
    unborn.mkdir(mode=0o700)
    try:
        # What is stored decides: a file may have changed since its hash was taken.
        manifest = _write_snapshot(unborn, selection)
        directory = root.snapshot(manifest.hash)
        with contextlib.suppress(FileExistsError):
            try:
                unborn.rename(directory.path)
            except OSError:
                # Another command has stored the same meanwhile: the error of a directory that is not empty.
                if not directory.path.exists():
                    raise
        fsync_directory(root.snapshots)
    finally:
        shutil.rmtree(unborn, ignore_errors=True)
    return manifest


def _write_snapshot(unborn: Path, selection: CodeSelection) -> CodeManifest:
    """Write the contents of files, in the order of their paths, and their manifest."""
    snapshot = RunsRoot(unborn.parent).snapshot("")
    contents, listed = unborn / snapshot.contents.name, unborn / snapshot.manifest.name
    with _create(contents) as file:
        # Fast rather than small; without the time of day, so that the same content gives the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=1, mtime=0) as packed:
            stored = []
            for path in sorted(selection.files):
                with contextlib.suppress(FileNotFoundError):  # it may have been deleted since it was listed
                    stored.append(hash_one(selection.root, path, selection.files[path], packed))
        _make_durable(file)
    manifest = CodeManifest.sorted(stored)
    with _create(listed) as file:
        file.write(manifest.to_bytes())
        _make_durable(file)
    fsync_directory(unborn)
    return manifest


def _create(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _READ_ONLY), "wb")


def _make_durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
