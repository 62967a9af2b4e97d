"""Who may use the files of a directory."""

from __future__ import annotations

import stat
from pathlib import Path


def open_to_others(directory: Path) -> dict[str, str]:
    """The files and directories in a directory, and itself, whose modes are not 0600 and 0700, with their modes.

    A file that never changes, such as one of a snapshot of code, has 0400.
    """
    wrong = {}
    for path in (directory, *directory.rglob("*")):
        mode = path.lstat().st_mode
        # The mode of a symbolic link means nothing.
        expected = (0o700,) if stat.S_ISDIR(mode) else (0o600, 0o400)
        if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) not in expected:
            wrong[str(path)] = f"{stat.S_IMODE(mode):04o}"
    return wrong
