"""Paths that depend on this process: its current directory, and its user's home directory."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.system.files import describe_os_error


def current_directory() -> Path:
    """The current directory. Raises PathError if it was deleted, or cannot be recorded in text files."""
    try:
        directory = Path.cwd()
    except OSError as error:
        raise PathError(f"the current directory is gone ({describe_os_error(error)}); change to another") from error
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise PathError(
            f"the path of the current directory, {str(directory)!a}, is not valid UTF-8; rename it"
        ) from None
    return directory


def expand_home(text: str) -> Path:
    """A path that may begin with ``~`` or ``~user``. Raises PathError if that directory is not known."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise PathError(f"{text}: the home directory is not known; set HOME, or write the path in full") from error
    if text.startswith("~") and not path.is_absolute():
        raise PathError(f"{text}: HOME is not an absolute path but {str(path)!r}; write the path in full")
    return path
