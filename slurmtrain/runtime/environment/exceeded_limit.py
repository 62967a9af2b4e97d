"""Which limit of processes (getrlimit(2)) a rank has met, as its end says, and where such a limit comes from."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.environment.file_limit import soft_limit_of_ranks


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
            return _describe(limit, soft, hard)
        # At the hard limit, which a shell sets with the soft one unless it says otherwise, the kernel does not warn.
        if limit.number == resource.RLIMIT_CPU and code == -signal.SIGKILL and 0 <= hard <= _cpu_time_of_children():
            return _describe(limit, hard, hard)
    return ""


def _cpu_time_of_children() -> float:
    """Seconds that the processes which have ended computed; of several ranks, their sum."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _describe(limit: _Limit, soft: int, hard: int) -> str:
    name, is_local = f"the limit of {limit.name}", variables.JOB_ID in os.environ
    if soft == resource.RLIM_INFINITY:
        # This agent has none.
        return f"{name} that the command set itself (ulimit {limit.option})"
    origin = "the shell that submitted the run, or setup" if is_local else "the node, slurm.propagate or setup"
    place = "there" if is_local else "in setup"
    lift = "unlimited" if hard == resource.RLIM_INFINITY else "hard"
    advice = f"'ulimit -S {limit.option} {lift}' {place} raises it" + ("" if lift == "unlimited" else f" to {hard:,}")
    if soft == hard:
        advice = "begin with a shell that has none" if is_local else "only an administrator can raise it on the node"
    return f"{name} is {soft:,} {limit.unit}".rstrip() + f" (ulimit {limit.option}, from {origin}); {advice}"
