"""Asking git about repositories: nothing is written in them, and no program that they name is run.

Settings of a repository name programs: filters of contents, hooks, monitors of files, commands that fetch. Whoever
made the repository may have chosen them, and a look at its files is no reason to run them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A hook, or a command in it, has these for the repository that it belongs to (git rev-parse --local-env-vars).
_OF_ANOTHER = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
})  # fmt: skip
# An object that a partial clone lacks is not fetched: no protocol is allowed, and none has this name.
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
          "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoGit(Exception):
    """A directory is in no work tree that git can read. ``why``: in a few words; empty if there is no repository."""

    why: str


def run_git(directory: Path, *arguments: str, timeout_s: float, stdin: bytes = b"") -> bytes:
    """The output of git in a directory.

    Args:
        directory: Where git runs.
        arguments: The command and its options.
        timeout_s: Time limit, in seconds.
        stdin: Its standard input.

    Raises:
        NoGit: It fails, or there is no git.
        subprocess.TimeoutExpired: It takes longer.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    # An entry such as "." would be a directory of the repository.
    path = os.pathsep.join(filter(os.path.isabs, environ.get("PATH", os.defpath).split(os.pathsep)))
    try:
        completed = subprocess.run(
            [
                "git",
                "-c",
                "core.fsmonitor=false",
                "-c",
                f"core.hooksPath={os.devnull}",
                "-C",
                str(directory),
                *arguments,
            ],
            env={**environ, **_QUIET, "PATH": path},
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


def without_filters(directory: Path, *, timeout_s: float) -> Sequence[str]:
    """Options of git, before its command, with which it takes the bytes of files as they are.

    Commands that compare or add contents need them; others run no filter. git-lfs is a filter, too: it runs programs
    that a repository may name (``lfs.extension`` in git-lfs-extensions(7)).

    Args:
        directory: In the repository.
        timeout_s: How long git may take.

    Raises:
        NoGit: It fails, or a filter has a name that no option can contain.
        subprocess.TimeoutExpired: It takes longer.
    """
    settings = run_git(directory, "config", "--list", "--name-only", "-z", timeout_s=timeout_s)
    keys = {os.fsdecode(key) for key in settings.split(b"\0")}
    filters = sorted({key.rpartition(".")[0] for key in keys if key.startswith("filter.") and key.count(".") > 1})
    if any("=" in each for each in filters):
        raise NoGit("the name of a filter contains '='")
    values = ("clean=", "smudge=", "process=", "required=false")
    return [word for each in filters for value in values for word in ("-c", f"{each}.{value}")]
