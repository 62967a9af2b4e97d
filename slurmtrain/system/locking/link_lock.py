"""A lock for file systems that have none: a second file, ``<lock>.held``, which exists as long as the lock is held.

It is made as a hard link, which succeeds for exactly one process, even on NFS (open(2), O_EXCL), and it names its
holder. The kernel does not remove it when that process dies. Therefore the next process on the same machine takes over
the lock of one that is surely dead. About a process on another machine nothing is sure: its lock stays.

Two processes may find the same dead holder. Only the one that holds a lock on that record, of this same kind, replaces
it, and only if it is still there; the other would remove the lock of the first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import zlib
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.system.files import FILE_MODE, describe_os_error
from slurmtrain.system.locking.lock_holders import read_record, this_holder
from slurmtrain.system.owned_files import open_regular

_RECORD_BYTES = 4096
# What link(2) fails with where there are no hard links, or not for this user.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LinkLock:
    """The lock in place of the file at ``path``. Its directory may be renamed meanwhile."""

    def __init__(self, path: Path) -> None:
        """Nothing is taken yet. Raises PathError if the directory cannot be opened."""
        self._path = path.with_name(f"{path.name}.held")
        self._record = b""
        try:
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise PathError(f"cannot open {path.parent}: {describe_os_error(error)}") from error

    def take(self) -> bool:
        """Take the lock if it is free, or if its holder is dead. Raises PathError if it cannot be created."""
        # The number makes the record unlike any other of this process.
        record = {**this_holder().to_dict(), "number": secrets.token_hex(8)}
        content = json.dumps(record).encode() + b"\n"
        try:
            if _take(self._folder, self._path.name, content):
                self._record = content
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise PathError(
                    f"the file system of {self._path.parent} has neither locks nor hard links; choose another "
                    "directory for the runs with --runs or SLURMTRAIN_RUNS"
                ) from error
            raise PathError(f"cannot create the lock {self._path}: {describe_os_error(error)}") from error
        return bool(self._record)

    def close(self) -> None:
        """Release the lock if it was taken, unless somebody has removed it meanwhile and another process has it."""
        with contextlib.suppress(OSError):
            if self._record and _read(self._folder, self._path.name) == self._record:
                os.unlink(self._path.name, dir_fd=self._folder)
        os.close(self._folder)

    def describe_holder(self) -> str:
        """Who holds the lock, and what to do if that process is gone, as the end of a sentence."""
        content = _read(self._folder, self._path.name)
        holder = None if content is None else read_record(content)
        text = f"held by {holder}" if holder is not None else "held by another process"
        if holder is not None and holder.process.alive() is not None:
            return text
        return f"{text}; if that process is gone, delete {self._path}"


def _take(folder: int, name: str, content: bytes) -> bool:
    if _create(folder, name, content):
        return True
    present = _read(folder, name)
    holder = None if present is None else read_record(present)
    # None from alive(): it is on another machine.
    if present is None or holder is None or holder.process.alive() is not False:
        return False
    guard = f"{name}.{zlib.crc32(present):08x}"
    if not _take(folder, guard, content):
        return False
    try:
        if _read(folder, name) != present:
            return False
        draft = _write_draft(folder, name, content)
        _sweep(folder, name)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(guard, dir_fd=folder)


def _sweep(folder: int, name: str) -> None:
    """Remove what killed processes have left of their tries: drafts, whose names nobody else uses."""
    for entry in os.listdir(folder):
        if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{16}}", entry):
            holder = read_record(_read(folder, entry) or b"")
            if holder is not None and holder.process.alive() is False:
                os.unlink(entry, dir_fd=folder)


def _create(folder: int, name: str, content: bytes) -> bool:
    """Create a file with this ``content``; False if one with this ``name`` exists. Raises OSError."""
    draft = _write_draft(folder, name, content)
    try:
        os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        # It was this very link if the answer of an NFS server was lost and the request repeated (open(2), O_EXCL).
        return os.stat(draft, dir_fd=folder).st_nlink == 2
    finally:
        os.unlink(draft, dir_fd=folder)
    return True


def _write_draft(folder: int, name: str, content: bytes) -> str:
    """Write the file that will be the lock under a name of its own, so that a lock always has its whole record."""
    draft = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(draft, flags, FILE_MODE, dir_fd=folder)
    try:
        os.write(handle, content)
        # A lock that a power failure leaves empty would name no holder, and stay for ever.
        os.fsync(handle)
    finally:
        os.close(handle)
    return draft


def _read(folder: int, name: str) -> bytes | None:
    """The content of a lock; None if there is none that can be read."""
    with contextlib.suppress(OSError, PathError):
        handle = open_regular(name, directory=folder)
        try:
            return os.read(handle, _RECORD_BYTES)
        finally:
            os.close(handle)
    return None
