"""Removing a directory tree, or what of it is not to be kept, without reaching anything outside it.

Every entry is removed by its name in a directory that is open, so nobody can put a link in the place of a directory
meanwhile. Links are removed and never followed, no other file system is entered, and what belongs to other accounts
stays. A file is never changed before it is removed: it may have other names elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import check_owner, open_directory, read_readable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The unit of st_blocks (stat(2)).
_BLOCK_BYTES = 512


@dataclass(slots=True)
class Removal:
    """What was removed, or would be.

    ``bytes``: how much space that frees. ``links``: links that were removed, whose targets stay, with these.
    ``problems``: what could not be removed, and why. ``trackers``: by tracker, the files and folders of its own that
    were removed.
    """

    bytes: int = 0
    links: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trackers: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: Removal) -> None:
        """Add what was removed elsewhere."""
        self.bytes += other.bytes
        self.links += other.links
        self.problems += other.problems
        for tracker, paths in other.trackers.items():
            self.trackers.setdefault(tracker, []).extend(paths)


def remove_tree(
    directory: Path, keep: Callable[[str], bool], names: Iterable[str] | None = None, *, dry: bool = False
) -> Removal:
    """Remove what is in a directory, and directories that are empty then.

    Args:
        directory: the directory, which itself stays.
        keep: whether a file stays, by its path relative to ``directory``.
        names: only these entries, of a directory that may be somebody else's: people put files next to each other's.
        dry: remove nothing.

    Returns:
        What was removed; problems are listed there.
    """
    tree = _Tree(directory, keep, dry=dry)
    try:
        handle = open_directory(directory, check=check_owner if names is None else lambda *_: None)
    except FileNotFoundError:
        return tree.removal
    except (OSError, PathError) as error:
        tree.note(directory, error)
        return tree.removal
    try:
        if names is None:
            tree.empty(handle, "")
        else:
            tree.remove(handle, names, "")
    finally:
        os.close(handle)
    return tree.removal


def unlink_logs(run: RunDir) -> None:
    """Remove the user's own links to logs (the key ``log``) of a ``run`` whose logs are about to go."""
    for note in run.attempts.glob("*/log-link"):
        with contextlib.suppress(OSError, PathError):
            path = Path(os.fsdecode(read_readable(note)))
            # The runs root may have been renamed meanwhile.
            if path.is_symlink() and run.id in path.readlink().parts:
                path.unlink()


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
        # Nothing can be removed from a directory that its owner cannot write to (unlink(2), EACCES).
        if not self._dry and not status.st_mode & stat.S_IWUSR:
            with contextlib.suppress(OSError):
                os.fchmod(handle, stat.S_IRWXU)
        self.remove(handle, sorted(os.listdir(handle)), prefix)

    def remove(self, handle: int, names: Iterable[str], prefix: str) -> None:
        """Remove entries of an open directory.

        Args:
            handle: the directory.
            names: the entries; missing ones are passed over.
            prefix: its path relative to the tree, with a slash at its end.
        """
        device = os.fstat(handle).st_dev
        for name in names:
            path = f"{prefix}{name}"
            try:
                self._remove(handle, name, path, device)
            except FileNotFoundError:
                continue  # something else removed it first
            except (OSError, PathError) as error:
                self.note(self._directory / path, error)
            except RecursionError:
                self.removal.problems.append(
                    f"the directories in {self._directory} are nested too deeply: remove it with 'rm -r'"
                )

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
            inner = os.open(name, _DIRECTORY, dir_fd=handle)
            try:
                # Again: between the two calls, the name may have come to mean another directory.
                status = os.fstat(inner)
                check_owner(status, self._directory / path)
                if status.st_dev != device:
                    self.removal.problems.append(f"{self._directory / path} is on another file system and was kept")
                    return
                self.empty(inner, f"{path}/")
            finally:
                os.close(inner)
            if not self._dry:
                # What is kept is still in it.
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=handle)
            return
        if self._keep(path):
            return
        check_owner(status, self._directory / path)
        if not self._dry:
            os.unlink(name, dir_fd=handle)
        self._count(status)
        if stat.S_ISLNK(status.st_mode):
            self.removal.links.append(str(self._directory / path))

    def _count(self, status: os.stat_result) -> None:
        """Count the space of a file if this was the last of its names; ``status``: from before it was removed."""
        key = (status.st_dev, status.st_ino)
        met = self._met.get(key, 0)
        if status.st_nlink == 1 + (met if self._dry else 0):
            self.removal.bytes += status.st_blocks * _BLOCK_BYTES
        else:
            self._met[key] = met + 1
