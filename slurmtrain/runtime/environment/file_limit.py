"""How many files a process may have open: the agent as many as the system allows, its ranks as many as the user.

A command may hold the locks of thousands of runs. Slurm hands the limits of sbatch on to its job: those are the user's.

Node 0's agent holds a connection from every node, and serves the store that every rank, and anybody who can reach it,
may connect to: with the usual soft limit of 1,024 it could soon open no file any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterable, Mapping

# Enough for all ports of a stranger's address, and not so many that a program which closes all it could have open,
# one by one, takes long.
_ENOUGH = 1 << 17
_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# What a command has open besides.
_OTHERS = 64


def soft_limit_of_ranks() -> int:
    """The soft limit that this process was started with, and that its ranks get; RLIM_INFINITY is -1."""
    return _limit


def make_room(files: int) -> None:
    """Let this process have so many more files open than it needs otherwise, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < files + _OTHERS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files + _OTHERS, hard) if hard >= 0 else files + _OTHERS, hard))


def restore_limit(soft: int, held: Iterable[int]) -> None:
    """Give this process back a user's soft limit, though it holds more files.

    Args:
        soft: The limit.
        held: Descriptors that stay open, under numbers above the limit: the lower ones are needed for other files.
    """
    current, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (current, resource.RLIM_INFINITY):
        return
    for handle in held:
        if handle < _OTHERS:
            fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, _OTHERS)
            os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def take_limits(limits: Mapping[int, tuple[int, int]]) -> None:
    """Give this process the limits of another one, for its children; the limits of open files are for its ranks.

    Args:
        limits: The soft and the hard one, by the number of the resource.
    """
    global _limit
    for number, (soft, hard) in limits.items():
        if number == resource.RLIMIT_NOFILE:
            _limit = soft
        # Nobody but root can raise a hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(number, (soft, hard))
    raise_soft_limit()


def raise_soft_limit() -> None:
    """Raise this process's soft limit as far as the hard one allows, for the node agent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH)), hard))
