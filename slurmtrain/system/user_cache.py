"""Answers that cost a moment and rarely change, kept in the user's cache directory: ``$XDG_CACHE_HOME/slurmtrain``.

A file holds one answer, and its key: all that the answer depends on. Nothing may rely on it: where the directory cannot
be used, nothing is kept.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.system.files import make_directory, read_json, write_json


def load_answer(name: str, key: Any) -> Any:
    """The answer that was stored under this name; None if there is none, or it was stored with another key.

    ``key``: plain data, as JSON has it.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        kept = read_json(_file(name))
        if kept is not None and kept.get("key") == key:
            return kept.get("answer")
    return None


def store_answer(name: str, key: Any, answer: Any) -> None:
    """Store an answer under a ``name``, for as long as its key stays the same.

    ``key``, ``answer``: plain data, as JSON has it.
    """
    with contextlib.suppress(PathError, OSError, RuntimeError):
        file = _file(name)
        make_directory(file.parent, private=True)
        write_json(file, {"key": key, "answer": answer}, private=True)


def file_identity(path: str) -> list[Any]:
    """What changes if the file or directory behind a path is replaced or changed: part of a key."""
    try:
        status = Path(path).stat()
    except OSError:
        return [path]
    return [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def cache_directory() -> Path:
    """The user's cache directory for slurmtrain. Raises RuntimeError if the home directory is not known."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # Relative paths are to be ignored (XDG Base Directory Specification).
    parent = configured if configured.is_absolute() else Path("~").expanduser() / ".cache"
    return parent / "slurmtrain"


def _file(name: str) -> Path:
    return cache_directory() / f"{name}.json"
