"""Removing a directory tree, or what of it is not to be kept, without reaching anything outside it.

Every entry is removed by its name in a directory that is open, so nobody can put a link in the place of a directory
meanwhile. Links are removed and never followed, no other file system is entered, and what belongs to other accounts
stays. A file is never changed before it is removed: it may have other names elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import check_owner, open_directory

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The unit of st_blocks (stat(2)).
_BLOCK_BYTES = 512


@dataclass(slots=True)
class Removal:
    """What was removed, or would be.

    ``bytes``: how much space that frees. ``links``: links that were removed, whose targets stay, with these.
    ``problems``: what could not be removed, and why.
    """

    bytes: int = 0
    links: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def remove_tree(directory: Path, keep: Callable[[str], bool], *, dry: bool = False) -> Removal:
    """Remove what is in a directory, and directories that are empty then.

    Args:
        directory: the directory, which itself stays.
        keep: whether a file stays, by its path relative to ``directory``.
        dry: remove nothing.

    Returns:
        What was removed; problems are listed there.
    """
    tree = _Tree(directory, keep, dry=dry)
    try:
        handle = open_directory(directory, check=check_owner)
    except FileNotFoundError:
        return tree.removal
    except (OSError, PathError) as error:
        tree.note(directory, error)
        return tree.removal
    try:
        tree.empty(handle, "")
    finally:
        os.close(handle)
    return tree.removal


class _Tree:
    """A tree that is being removed."""

    def __init__(self, directory: Path, keep: Callable[[str], bool], *, dry: bool) -> None:
        self._directory = directory
        self._keep = keep
        self._dry = dry
        self.removal = Removal()
        # How many names were met of each file: its space is freed with the last of them.
        self._met: dict[tuple[int, int], int] = {}

    def note(self, path: Path, error: Exception) -> None:
        """Add a problem."""
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        self.removal.problems.append(why if str(path) in why else f"{path}: {why}")

    def empty(self, handle: int, prefix: str) -> None:
        """Remove what is in an open directory. ``prefix``: its path relative to the tree, with a slash at its end."""
        status = os.fstat(handle)
        if not self._dry and not status.st_mode & stat.S_IWUSR:
            with contextlib.suppress(OSError):
                os.fchmod(handle, stat.S_IRWXU)
        for name in sorted(os.listdir(handle)):
            path = f"{prefix}{name}"
            try:
                self._remove(handle, name, path, status.st_dev)
            except FileNotFoundError:
                continue  # something else removed it first
            except (OSError, PathError) as error:
                self.note(self._directory / path, error)
            except RecursionError:
                self.removal.problems.append(f"{self._directory} has directories too deep in each other: 'rm -r' it")

    def _remove(self, handle: int, name: str, path: str, device: int) -> None:
        """Remove an entry of an open directory.

        Args:
            handle: the directory.
            name: the entry.
            path: its path relative to the tree.
            device: the file system of the directory.
        """
        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._remove_directory(handle, name, path, device)
            return
        if self._keep(path):
            return
        check_owner(status, self._directory / path)
        if not self._dry:
            os.unlink(name, dir_fd=handle)
        self._count(status)
        if stat.S_ISLNK(status.st_mode):
            self.removal.links.append(str(self._directory / path))

    def _remove_directory(self, handle: int, name: str, path: str, device: int) -> None:
        inner = os.open(name, _DIRECTORY, dir_fd=handle)
        try:
            status = os.fstat(inner)
            check_owner(status, self._directory / path)
            if status.st_dev != device:
                self.removal.problems.append(f"{self._directory / path} is another file system, and stays")
                return
            self.empty(inner, f"{path}/")
        finally:
            os.close(inner)
        if not self._dry:
            # What is kept is still in it.
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=handle)

    def _count(self, status: os.stat_result) -> None:
        """Count the space of a file if this was the last of its names; ``status``: from before it was removed."""
        key = (status.st_dev, status.st_ino)
        met = self._met.get(key, 0)
        if status.st_nlink == 1 + (met if self._dry else 0):
            self.removal.bytes += status.st_blocks * _BLOCK_BYTES
        else:
            self._met[key] = met + 1
