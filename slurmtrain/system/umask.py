"""The umask of slurmtrain's own processes, and that of the commands which they run for the user.

A mode of 0600 given to open(2) is not enough: libraries such as submitit and MLflow open files without one, and a umask
such as 0777 would take the owner's rights too. A script's files, however, may be meant for others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

PRIVATE = 0o077
VARIABLE = "SLURMTRAIN_UMASK"
"""Carries the user's umask, in octal, from a command through the job to its ranks."""
# Shell lines around those of a spec's setup, which run with the user's umask, and may set one for the ranks.
BEFORE_SETUP = f'umask "${{{VARIABLE}:-$(umask)}}"'
AFTER_SETUP = f'export {VARIABLE}="$(umask)"; umask {PRIVATE:03o}'

_inherited: list[int] = []


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Within this context, new files and directories are accessible to their owner alone."""
    before = os.umask(PRIVATE)
    _inherited.append(before)
    try:
        yield
    finally:
        _inherited.pop()
        os.umask(before)


def enter_agent() -> None:
    """Make new files of this process, a node agent, private for good; note in its environment what its ranks get."""
    before = os.umask(PRIVATE)
    os.environ.setdefault(VARIABLE, f"{before:04o}")


def users_umask() -> dict[str, str]:
    """The variable for a job that this process submits: the umask outside of :func:`private_umask`."""
    if _inherited:
        return {VARIABLE: f"{_inherited[0]:04o}"}
    # It cannot be read without setting it (umask(2)).
    os.umask(mask := os.umask(PRIVATE))
    return {VARIABLE: f"{mask:04o}"}
