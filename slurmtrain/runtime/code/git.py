"""Asking git about repositories, in which nothing is written by that, and whose hooks and monitors do not run."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# A hook, or a command in it, has these for the repository that it belongs to (git rev-parse --local-env-vars).
_OF_ANOTHER = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoGit(Exception):
    """A directory is in no work tree that git can read. ``why``: in a few words; empty if there is no repository."""

    why: str


def run_git(directory: Path, *arguments: str, timeout_s: float, stdin: bytes = b"") -> bytes:
    """What git prints in a directory.

    Args:
        directory: Where.
        arguments: The command and its options.
        timeout_s: How long it may take.
        stdin: What it reads.

    Raises:
        NoGit: It fails, or there is no git.
        subprocess.TimeoutExpired: It takes longer.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    try:
        completed = subprocess.run(
            # A monitor of files is a program that the repository names.
            ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments],
            env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise NoGit("there is no git on PATH") from None
    except OSError as error:
        raise NoGit(f"git cannot be started: {error.strerror}") from None
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        raise NoGit(lines[0].removeprefix("fatal: ") if lines else f"git exited with {completed.returncode}")
    return completed.stdout
