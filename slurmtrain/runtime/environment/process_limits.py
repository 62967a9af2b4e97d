"""Limits of processes (getrlimit(2)): how many files agents and ranks may open, and which limit a rank has met.

A command may hold the locks of thousands of runs. Slurm hands the limits of sbatch on to its job: those are the user's.

Node 0's agent holds a connection from every node, and serves the store that every rank, and anybody who can reach it,
may connect to: with the usual soft limit of 1,024 it could soon open no file any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


# --- which limit a rank has met ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit: its number, its option of ``ulimit``, and how its end is told.

    ``unit``: bytes, seconds or a count. ``ended_by``: the signal of the kernel; None: there is none. ``message``: what
    libraries print; empty: nothing.
    """

    number: int
    option: str
    name: str
    unit: str
    ended_by: signal.Signals | None = None
    message: str = ""


_LIMITS = (
    _Limit(resource.RLIMIT_CPU, "-t", "CPU time of a process", "s", signal.SIGXCPU),
    # Python ignores the signal.
    _Limit(resource.RLIMIT_FSIZE, "-f", "the size of a file", "bytes", signal.SIGXFSZ, r"File too large"),
    _Limit(resource.RLIMIT_NPROC, "-u", "processes and threads of the user on a node", "", None,
           r"Resource temporarily unavailable|can't start new thread|pthread_create failed|[Cc]annot fork"),
    _Limit(resource.RLIMIT_AS, "-v", "address space of a process", "bytes", None,
           r"\bMemoryError\b|Cannot allocate memory|can't allocate memory|std::bad_alloc"),
    _Limit(resource.RLIMIT_NOFILE, "-n", "open files of a process", "", None, r"Too many open files"),
)  # fmt: skip


def exceeded_limit(code: int, lines: Sequence[str]) -> str:
    """The limit that a rank of this agent has met, in words, with where it is set; empty if none is known to be.

    Args:
        code: its exit code, negative for a signal.
        lines: its exception, or the last lines of its log.
    """
    text = "\n".join(lines)
    for limit in _LIMITS:
        soft, hard = resource.getrlimit(limit.number)
        if limit.number == resource.RLIMIT_NOFILE:
            soft = soft_limit_of_ranks()
        is_signalled = limit.ended_by is not None and code in (-limit.ended_by, 128 + limit.ended_by)
        if soft == resource.RLIM_INFINITY and not is_signalled:
            continue
        if is_signalled or (code and limit.message and re.search(limit.message, text)):
            return _describe_limit(limit, soft, hard)
        # At the hard limit, which a shell sets with the soft one unless it says otherwise, the kernel does not warn.
        if limit.number == resource.RLIMIT_CPU and code == -signal.SIGKILL and hard >= 0:
            # By all processes that have ended: of several ranks, the sum.
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            if hard <= spent.ru_utime + spent.ru_stime:
                return _describe_limit(limit, hard, hard)
    return ""


def _describe_limit(limit: _Limit, soft: int, hard: int) -> str:
    # What calls sbatch imports this module for one number.
    from slurmtrain.runtime.environment import variables

    name, is_local = f"the limit of {limit.name}", variables.JOB_ID in os.environ
    if soft == resource.RLIM_INFINITY:
        # This agent has none.
        return f"{name} that the command set itself (ulimit {limit.option})"
    origin = "the shell that submitted the run, or setup" if is_local else "the node, slurm.propagate or setup"
    place = "there" if is_local else "in setup"
    lift = "unlimited" if hard == resource.RLIM_INFINITY else "hard"
    advice = f"'ulimit -S {limit.option} {lift}' {place} raises it" + ("" if lift == "unlimited" else f" to {hard:,}")
    if soft == hard:
        advice = (
            "start from a shell without this limit" if is_local else "only an administrator can raise it on the node"
        )
    return f"{name} is {soft:,} {limit.unit}".rstrip() + f" (ulimit {limit.option}, from {origin}); {advice}"
