"""Processes that the ranks of a run have left on this machine, in an attempt whose agent was killed.

While an agent lives, it ends everything that its ranks have started. If it is killed, the kernel signals the ranks, but
not their children, and another attempt would train beside them. They are found by a variable in the environment that
they were started with. A process that was started with an empty environment is not found.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.environment.variables import ATTEMPT_DIR, SETUP_OF
from slurmtrain.system.process import Process, identify, marked, name_of

_POLL_S = 0.05
# A killed process ends at once, unless it is in a system call that cannot be interrupted.
_KILL_S = 10.0
# How long what setup has left running has to end by itself.
_END_S = 2.0


def runs_with_processes() -> set[str]:
    """The ids of all runs, in any runs root, with processes on this machine: this user's ranks, or their children."""
    return {attempt.parent.parent.name for attempt in _attempts().values()}


def find_leftovers(run: RunDir, *, except_of: AttemptDir | None = None) -> list[Process]:
    """The processes of this user on this machine that ranks of ``run``, or their children, have started.

    ``except_of``: an attempt whose processes are not meant.
    """
    processes = []
    for pid, attempt in _attempts().items():
        if _is_same(attempt.parent.parent, run.path) and (except_of is None or attempt.name != except_of.path.name):
            process = identify(pid)
            if process is not None:
                processes.append(process)
    return processes


def kill_leftovers(run: RunDir, *, except_of: AttemptDir | None = None) -> list[str]:
    """Kill the leftovers of the ``run``, and processes that they start meanwhile; returns a description of each.

    ``except_of``: an attempt whose processes are left alone.
    """
    killed: dict[Process, str] = {}
    deadline = time.monotonic() + _KILL_S
    while (leftovers := find_leftovers(run, except_of=except_of)) and time.monotonic() < deadline:
        for process in leftovers:
            killed.setdefault(process, f"{name_of(process.pid)} (pid {process.pid})")
            process.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    return list(killed.values())


def end_processes_of_setup(attempt: AttemptDir) -> list[str]:
    """End what the setup of an attempt has started on this machine and left running; returns what had to be killed."""

    def find() -> list[Process]:
        pids = [pid for pid, values in marked((SETUP_OF,)).items() if Path(values[SETUP_OF]).name == attempt.path.name]
        return [process for pid in pids if (process := identify(pid)) is not None]

    processes = find()
    for process in processes:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while processes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        processes = find()
    killed = [f"{name_of(process.pid)} (pid {process.pid})" for process in processes]
    for process in processes:
        process.send(signal.SIGKILL)
    return killed


def _attempts() -> dict[int, Path]:
    """The directory of the attempt of each process of this user that ranks, setup, or their children have started."""
    processes = marked((ATTEMPT_DIR, SETUP_OF))
    return {pid: Path(values.get(ATTEMPT_DIR) or values[SETUP_OF]) for pid, values in processes.items()}


def _is_same(path: Path, other: Path) -> bool:
    """Whether both paths are the same directory: users and jobs may reach it by different names."""
    if path.name != other.name:
        return False
    try:
        return path.samefile(other)
    except OSError:
        return path == other
