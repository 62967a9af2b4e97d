"""Noticing that a directory in use is deleted, wherever it was moved before."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

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
            os.close(self._handle)

    def _is_gone(self) -> bool:
        try:
            os.stat(self._file, dir_fd=self._handle, follow_symlinks=False)
        except OSError as error:
            return error.errno in _GONE
        return False
