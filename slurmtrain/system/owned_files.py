"""Whether a file can be trusted, and opening one in a way that reveals it.

Trusted is what belongs to the account that runs this process, or to root, and what no other account can write to. The
object itself decides, judged through its descriptor, and not the directories above it: a project's directory usually
belongs to somebody else, and its group may write to it. Whoever can write there can rename my directory and put another
in its place, but cannot make that one mine.

What is opened here is never a symbolic link to a file, a FIFO or a device, and opening it never blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO

from slurmtrain.errors import PathError, UntrustedPath

# O_NONBLOCK: opening a FIFO waits for its other end otherwise. It means nothing for regular files.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = 0o600

Check = Callable[[os.stat_result, Path | str], None]
"""Raises UntrustedPath unless an object with this status, opened at this path, can be trusted."""

_ON_NOBODY = (
    " (nobody stands for accounts that a machine, container or NFS mount does not map, root's with root_squash)"
)
# As many links as the kernel follows (path_resolution(7)).
_MAX_LINKS = 40
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_owned(status: os.stat_result, path: Path | str, *, owner: int | None = None) -> None:
    """Raise UntrustedPath, which says whose it is and what to do, unless an object can be trusted.

    Args:
        status: The object's status, from ``fstat``: a path may name another object by the time it is opened.
        path: Its path, for the message.
        owner: The user id that it must belong to, if not to root; by default this process's.
    """
    check_owner(status, path, owner=owner)
    writers = _other_writers(status, path)
    if writers:
        command = f"'chmod {'-R ' if stat.S_ISDIR(status.st_mode) else ''}go-w {path}'"
        cure = f"look at what is in it, then run {command}"
        if status.st_uid != os.geteuid():
            cure = f"{account_name(status.st_uid)} can run {command}"
        raise UntrustedPath(f"{path} can be written by {writers} (mode {stat.S_IMODE(status.st_mode):04o})", cure)


def check_owner(status: os.stat_result, path: Path | str, *, owner: int | None = None) -> None:
    """Judge an object by its owner alone, whoever may write to it: for what users' own programs create.

    ``status``, ``path`` and ``owner`` are as for :func:`check_owned`. Raises UntrustedPath.
    """
    if owner is None:
        owner = os.geteuid()
    if status.st_uid not in (owner, 0):
        # The kernel's default (proc(5), /proc/sys/kernel/overflowuid).
        nobody = 65534
        with contextlib.suppress(OSError, ValueError):
            nobody = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
        raise UntrustedPath(
            f"{path} belongs to {account_name(status.st_uid)}, neither to {account_name(owner)} nor to root",
            f"remove it, or use another place{_ON_NOBODY if status.st_uid == nobody else ''}",
        )


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, *, directory: int | None = None, check: Check = check_owned
) -> int:
    """Open a regular file that can be trusted, without following a link or waiting for a FIFO; returns its descriptor.

    A file that is created is private, whatever the umask allows.

    Args:
        path: The file.
        flags: As for ``os.open``. Not O_TRUNC, which would empty the file before it is judged.
        directory: A descriptor of the file's directory, if that has been checked: the file is opened relative to it,
            whatever its path has come to mean since.
        check: Who may own the file or write to it.

    Raises:
        UntrustedPath: It is not a regular file, or somebody else owns it or can write to it.
        OSError: As ``os.open``.
    """
    assert not flags & os.O_TRUNC
    name = path if directory is None else os.path.basename(path)  # noqa: PTH119 (a Path takes longer than the open)
    try:
        handle = os.open(name, flags | _SAFELY, _PRIVATE, dir_fd=directory)
    except OSError as error:
        # ELOOP: a link; ENXIO: a FIFO that nobody reads, or a socket; EISDIR: a directory, opened for writing.
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not(os.stat(name, dir_fd=directory, follow_symlinks=False), path, stat.S_IFREG) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not(status, path, stat.S_IFREG)
        check(status, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_directory(path: Path | str, *, check: Check = check_owned) -> int:
    """Open a directory that can be trusted; returns its descriptor.

    It may be a symbolic link of one's own: users move directories to other file systems.

    Args:
        path: The directory.
        check: Who may own the directory or write to it.

    Raises:
        UntrustedPath: Somebody else owns it, or the link, or can write to it.
        OSError: As ``os.open``.
    """
    try:
        handle = os.open(path, os.O_DIRECTORY | _SAFELY)
    except NotADirectoryError:
        # Linux reports a link like this as well, if O_DIRECTORY and O_NOFOLLOW are combined.
        handle = os.open(follow_links(path), os.O_DIRECTORY | _SAFELY)
    try:
        check(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_checked(path: Path, flags: int = os.O_RDONLY, *, check: Check = check_owned) -> int:
    """Like :func:`open_regular`, but first check the directory that the file is in, and open it relative to that.

    For files that are not read in bulk, and for files that are created: a new file is always one's own, also in a
    directory of somebody else. ``path``, ``flags`` and ``check`` are as for :func:`open_regular`.
    """
    directory = open_directory(path.parent, check=check)
    try:
        return open_regular(path, flags, directory=directory, check=check)
    finally:
        os.close(directory)


def check_entry(path: Path) -> None:
    """Check a regular file, and its directory, like :func:`open_checked`, but without opening it.

    For SQLite's files: closing a descriptor of one would release the locks that this process has on it (fcntl(2)).
    SQLite opens it by its path afterwards, and follows links. Nobody else can replace the file in between, since nobody
    else can write to its directory.
    """
    directory = open_directory(path.parent)
    try:
        status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(directory)
    if not stat.S_ISREG(status.st_mode):
        raise _not(status, path, stat.S_IFREG)
    check_owned(status, path)


def check_directory(path: Path | str, *, check: Check = check_owned) -> None:
    """Check a directory in one that has been checked, in a single system call, unless it is a link.

    ``path`` and ``check`` are as for :func:`open_directory`. Raises UntrustedPath; PathError for too many links;
    OSError, such as NotADirectoryError.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        status = follow_links(path).stat()
    check(status, path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def read_checked(path: Path, *, check: Check = check_owned) -> bytes:
    """The content of a file, opened by :func:`open_checked`."""
    with os.fdopen(open_checked(path, check=check), "rb") as file:
        return file.read()


def open_readable(path: Path | str) -> BinaryIO:
    """Open a regular file for reading, whoever owns it and wherever links lead, without waiting for a FIFO.

    For what programs of users have written: logs, and checkpoints of scripts. Raises OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(status)}, not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_readable(path: Path | str) -> bytes:
    """The content of a file, opened by :func:`open_readable`."""
    with open_readable(path) as file:
        return file.read()


def follow_links(path: Path | str) -> Path:
    """What a path refers to, as an absolute path without links; it need not exist.

    Only the links that the path itself, or the target of one, is are judged, by whose they are; directories above it
    may be links of anybody's.

    Raises UntrustedPath if one of them is somebody else's; PathError if there are too many, as with a link to itself.
    """
    place = Path(path)
    for _ in range(_MAX_LINKS):
        # The parent first: ".." after a link means the parent of the link's target.
        parent = Path(os.path.realpath(place.parent))
        place = Path(os.path.realpath(place)) if place.name in ("", "..") else parent / place.name
        try:
            status = place.lstat()
        except OSError:
            return place  # opening it gives the reason
        if not stat.S_ISLNK(status.st_mode):
            return place
        check_owner(status, place)
        place = place.parent / place.readlink()
    raise PathError(f"{path} leads through more than {_MAX_LINKS} symbolic links; remove the last one")


def user_name(uid: int) -> str:
    """The name of an account; its number in digits if this machine has no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def account_name(uid: int) -> str:
    """An account in a sentence: by its name if it has one."""
    name = user_name(uid)
    return f"the account {name}" if name.isdigit() else name


def kind_of(status: os.stat_result) -> str:
    """What an object with this status is, such as ``a FIFO``."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def _not(status: os.stat_result, path: Path | str, expected: int) -> UntrustedPath:
    return UntrustedPath(f"{path} is {kind_of(status)}, not {_KINDS[expected]}", "move it away")


def _other_writers(status: os.stat_result, path: Path | str) -> str:
    """Who can write to an object besides its owner, for a message; empty if nobody but root can.

    A group does not count if only the owner is in it: with the umask 002, which is common, every file can be written by
    its owner's private group.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everyone"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if not _is_private_group(status.st_gid, status.st_uid):
        import grp

        with contextlib.suppress(KeyError):
            return f"the group {grp.getgrgid(status.st_gid).gr_name}"
        return f"the group {status.st_gid}"
    # If there is an access control list, the group's bits are the most that anybody in the list can do (acl(5)).
    with contextlib.suppress(OSError):  # none, or the file system has no such lists
        return "accounts in its access control list" if os.getxattr(path, "system.posix_acl_access") else ""
    return ""


@cache
def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group is an account's primary group, named after it, and no other account is in it."""
    import grp
    import pwd

    try:
        account, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    # The name is compared since the accounts of a directory service are often not listed: the primary group of all of
    # them, which does not list them either, would look as if it were somebody's own.
    if (account.pw_gid, account.pw_name) != (gid, group.gr_name) or not set(group.gr_mem) <= {account.pw_name}:
        return False
    # A group does not list its members whose primary group it is.
    return all(other.pw_uid == uid for other in pwd.getpwall() if other.pw_gid == gid)
