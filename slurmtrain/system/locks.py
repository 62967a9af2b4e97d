"""Locks between commands, which are files: released when their holder dies, and waited for with a word about it.

The kernel's lock on the file (flock) decides. Where a file system has no locks (NFS without its lock manager, Lustre
mounted with ``noflock``, some FUSE file systems), or where their reach is one machine, a hard link takes their place
(:mod:`~slurmtrain.system.locking.link_lock`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import LockHeld, PathError
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.locking import mounts
from slurmtrain.system.locking.lock_holders import describe_holder, this_holder, write_record
from slurmtrain.system.locking.waiting import LIMIT_S, Waiting, print_notice
from slurmtrain.system.owned_files import open_checked

if TYPE_CHECKING:
    from slurmtrain.system.locking.link_lock import LinkLock

# What flock(2) and fcntl(2) fail with where a file system has no locks.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

# How SQLite opens files without any lock (a "VFS" of its), for code that has a lock of its own. Its option "nolock"
# does not suffice: where a killed process has left a journal, SQLite still asks for a lock, and reports an I/O error
# (sqlite3OsCheckReservedLock).
SQLITE_WITHOUT_LOCKS = "unix-none"


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, limit_s: float = LIMIT_S) -> Iterator[int | None]:
    """Hold the exclusive lock at ``path``, which is released if this process dies.

    Yields the descriptor of the lock's file: where the kernel has the lock, a child that inherits it holds it too.
    Yields None, without the lock, if another process holds it and ``wait`` is false. With ``wait``, whoever waits is
    told after two seconds who holds the lock.

    Raises:
        LockHeld: another process has held it for ``limit_s`` seconds.
        PathError: the lock file cannot be opened.
    """
    with open_lock(path) as handle, contextlib.ExitStack() as stack:
        link: LinkLock | None = None
        waiting = Waiting(limit_s, lambda: f"the lock {path}, {_holder(path, handle, link)}")
        while not (is_ours := _take(handle, link)):
            if is_ours is None:
                link = stack.enter_context(contextlib.closing(_replacement(path, handle)))
            elif not wait:
                yield None
                return
            elif not waiting.pause():
                raise LockHeld(f"the lock {path}", _holder(path, handle, link), limit_s)
        if link is None:
            write_record(handle, this_holder())
        yield handle


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """The descriptor of the lock file at ``path``, which is created if it does not exist.

    Raises UntrustedPath if it is a link, or it or its directory is somebody else's; PathError if it cannot be opened.
    """
    try:
        handle = open_checked(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise PathError(f"cannot open the lock {path}: {describe_os_error(error)}") from error
    try:
        yield handle
    finally:
        os.close(handle)


def try_flock(handle: int) -> bool | None:
    """Take the kernel's lock on an open file: False if another process has it, None if it would not keep all out."""
    if _has_local_locks(os.fstat(handle).st_dev):
        return None
    try:
        # flock, not lockf: the lock belongs to the open file description, so a child that inherits the descriptor
        # holds it too, and closing another descriptor of the file does not release it (fcntl(2), "Record locking").
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise PathError(f"cannot lock a file: {describe_os_error(error)}") from error
    return True


def has_record_locks(path: Path) -> bool:
    """Whether fcntl's locks, which SQLite uses, work on the file system of the lock file at ``path``.

    Not to be called with a file that this process has locked like that: closing any descriptor releases such locks.
    """
    with open_lock(path) as handle:
        if _has_local_locks(os.fstat(handle).st_dev):
            return False
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in NO_LOCKS
    return True


def _take(handle: int, link: LinkLock | None) -> bool | None:
    return try_flock(handle) if link is None else link.take()


def _holder(path: Path, handle: int, link: LinkLock | None) -> str:
    return describe_holder(path, handle) if link is None else link.describe_holder()


def _replacement(path: Path, handle: int) -> LinkLock:
    # Imported here: hardly any file system needs it.
    from slurmtrain.system.locking.link_lock import LinkLock

    _announce(os.fstat(handle).st_dev)
    return LinkLock(path)


@cache
def _has_local_locks(device: int) -> bool:
    mount = mounts.mount_of(device)
    return mount is not None and mount.has_local_locks


@cache
def _announce(device: int) -> None:
    """Note, once, that hard links replace locks on a file system."""
    mount = mounts.mount_of(device)
    print_notice(
        f"note: {mount or 'the file system of the runs'} has no locks that reach all machines: slurmtrain uses hard "
        "links instead; a lock that a dead machine leaves must be deleted by hand"
    )
