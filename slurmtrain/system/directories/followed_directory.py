"""A directory that stays the same one, whatever its path comes to mean: people rename directories that are in use."""

from __future__ import annotations

import contextlib
import os
import re
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
        return f"its directory was moved from {self.path} to {now} while it ran"


def without_aliases(text: str) -> str:
    """A message for people: aliases of directories in the ``text`` are replaced by their paths."""

    def path(alias: re.Match[str]) -> str:
        with contextlib.suppress(OSError):
            return str(Path(alias[0]).readlink())
        return alias[0]

    return _ALIAS.sub(path, text)
