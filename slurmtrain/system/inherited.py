"""What this process has from its user: a current directory, a home directory, a umask.

The umask is replaced. A mode of 0600 given to open(2) is not enough: libraries such as submitit and MLflow open files
without one, and a umask such as 0777 would take the owner's rights too. A script's files, however, may be meant for
others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.errors import PathError

PRIVATE = 0o077
UMASK_VARIABLE = "SLURMTRAIN_UMASK"
"""Carries the user's umask, in octal, from a command through the job to its ranks."""
# Shell lines around the lines of a spec's setup, which run with the user's umask, and may set one for the ranks.
# Wherever they go, the agent starts in a directory of the run: "python -m" searches the current directory first.
BEFORE_SETUP = f'SLURMTRAIN_CWD="$PWD"; umask "${{{UMASK_VARIABLE}:-$(umask)}}"'
AFTER_SETUP = f'export {UMASK_VARIABLE}="$(umask)"; umask {PRIVATE:03o}; cd "$SLURMTRAIN_CWD"; unset SLURMTRAIN_CWD'

# The user's umask, once for each context that has replaced it: threads share the umask, and leave in any order.
_inherited: list[int] = []
_replacing = threading.Lock()


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Within this context, new files and directories of all threads are accessible to their owner alone."""
    _replace_umask()
    try:
        yield
    finally:
        _restore_umask()


@contextlib.contextmanager
def public_umask() -> Iterator[None]:
    """Within this context, inside of :func:`private_umask`, the user's umask is in force unless threads forbid it."""
    _restore_umask()
    try:
        yield
    finally:
        _replace_umask()


def umask_of_ranks() -> int:
    """In a job, the umask with which ranks create files: the user's, except that their owner keeps all rights."""
    return int(os.environ.get(UMASK_VARIABLE, f"{PRIVATE:03o}"), 8) & PRIVATE


def _replace_umask() -> None:
    with _replacing:
        _inherited.append(_inherited[0] if _inherited else os.umask(PRIVATE))


def _restore_umask() -> None:
    with _replacing:
        before = _inherited.pop()
        if not _inherited:
            os.umask(before)


def enter_agent() -> None:
    """Make new files of this process, a node agent, private for good; note in its environment what its ranks get."""
    before = os.umask(PRIVATE)
    # The submitting command has set it, unless the site's sbatch exports nothing.
    os.environ.setdefault(UMASK_VARIABLE, f"{before:04o}")


def users_umask() -> dict[str, str]:
    """The variable for a job that this process submits: the umask outside of :func:`private_umask`."""
    if _inherited:
        return {UMASK_VARIABLE: f"{_inherited[0]:04o}"}
    # It cannot be read without setting it (umask(2)).
    os.umask(mask := os.umask(PRIVATE))
    return {UMASK_VARIABLE: f"{mask:04o}"}


def current_directory() -> Path:
    """The current directory. Raises PathError if it was deleted, or cannot be recorded in text files."""
    try:
        directory = Path.cwd()
    except OSError as error:
        raise PathError(f"the current directory is gone ({str(error.strerror).lower()}); change to another") from error
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
