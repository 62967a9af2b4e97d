"""Directories in use, which people rename and delete: following one wherever it is moved, and noticing its deletion."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from pathlib import Path

_ALIAS = re.compile(r"/proc/self/fd/\d+")


class FollowedDirectory:
    """An open directory. Renaming it, or a directory above it, does not change what ``alias`` leads to."""

    def __init__(self, path: Path) -> None:
        """Open the directory at ``path``. Raises OSError."""
        self.path = path
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def alias(self) -> Path:
        """A path to the directory for this process, and for children that inherit ``handle`` (proc(5), /proc/pid/fd).

        It is gone when the directory is closed.
        """
        return Path(f"/proc/self/fd/{self.handle}")

    def close(self) -> None:
        """Close the directory."""
        os.close(self.handle)

    def displacement(self) -> str:
        """What has happened to the directory, as a sentence without a full stop; empty if it is still at its path."""
        opened = os.fstat(self.handle)
        try:
            if os.path.samestat(opened, self.path.stat()):
                return ""
        except FileNotFoundError:
            pass
        except OSError:
            return ""  # a file server does not answer: nothing is known
        now = str(self.alias.readlink())
        if opened.st_nlink == 0 or now == str(self.path):
            return f"its directory {self.path} was deleted"
        return f"its directory was moved from {self.path} to {now} while it was running"


def without_aliases(text: str) -> str:
    """A message for people: aliases of directories in the ``text`` are replaced by their paths."""

    def path(alias: re.Match[str]) -> str:
        with contextlib.suppress(OSError):
            return str(Path(alias[0]).readlink())
        return alias[0]

    return _ALIAS.sub(path, text)


# How often to look, in seconds.
_PERIOD_S = 2.0
# What a file of a deleted directory, or of a file server that has forgotten it, fails with.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


class DeletionWatch:
    """Looks from time to time whether a file of a directory is still there.

    In a thread of its own: a file server that does not answer must not hold up whoever asks :attr:`deleted`.
    """

    def __init__(self, directory: Path, file: str) -> None:
        """Begin to look.

        Args:
            directory: an existing directory. It is kept open, so moving it is no deletion.
            file: the name of a file in it that nobody keeps open: network file systems keep open files.

        Raises:
            OSError: the directory cannot be opened.
        """
        self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file = file
        self._closed = threading.Event()
        self._deleted = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def deleted(self) -> bool:
        """Whether the file is gone."""
        return self._deleted.is_set()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _look(self) -> None:
        try:
            while not self._is_gone():
                if self._closed.wait(_PERIOD_S):
                    return
            self._deleted.set()
        finally:
            # By this thread: closed by another, its number could mean another file in the next stat().
            os.close(self._handle)

    def _is_gone(self) -> bool:
        try:
            os.stat(self._file, dir_fd=self._handle, follow_symlinks=False)
        except OSError as error:
            # Any other error says that the server does not answer, not that the file is gone.
            return error.errno in _GONE
        return False
