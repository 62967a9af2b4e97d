"""How much the main threads of ranks have computed lately, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A share is measured over at least this many seconds.
_LEAST_S = 1.0
# Where the counters are in /proc/<pid>/task/<tid>/stat, after the thread's name: minor faults, and the time spent in
# user and in kernel mode. See proc(5).
_FAULTS, _USER, _SYSTEM = 7, 11, 12


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What a process's main thread has used since it started.

    ``at``: when that was measured, by the monotonic clock. ``cpu_s``: seconds on a processor, or ready to run while
    others had all processors. ``waits``: how often it has waited for something in the kernel, or touched new memory.
    """

    pid: int
    at: float
    cpu_s: float
    waits: int

    @classmethod
    def now(cls, pid: int) -> ThreadUse | None:
        """Measure it; None if there is no such process."""
        thread = Path(f"/proc/{pid}/task/{pid}")
        try:
            # The thread's name is in parentheses and may contain anything, even parentheses.
            stat = (thread / "stat").read_bytes().rpartition(b")")[2].split()
            status = (thread / "status").read_text()
            cpu_s = _busy(thread) or (int(stat[_USER]) + int(stat[_SYSTEM])) / _TICKS_PER_S
        except OSError:
            return None
        switches = [line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt_switches:")]
        return cls(pid, time.monotonic(), cpu_s, int(stat[_FAULTS]) + sum(map(int, switches)))


def _busy(thread: Path) -> float | None:
    """Seconds that a thread has run or has been ready to run; None if the kernel does not count them."""
    try:
        running_ns, ready_ns, *_ = (thread / "schedstat").read_text().split()
        return (int(running_ns) + int(ready_ns)) / 1e9
    except (OSError, ValueError):
        return None


def share(before: ThreadUse, now: ThreadUse, *, on_gpu: bool) -> float:
    """The part of a core that a thread has used between two measurements, ``before`` and ``now``.

    0 for a process ``on_gpu`` whose thread has not once entered the kernel for it: a thread that waits for a GPU spins,
    in the CUDA driver, with all of a core.
    """
    if on_gpu and now.waits == before.waits:
        return 0.0
    return max(0.0, now.cpu_s - before.cpu_s) / max(now.at - before.at, 1e-3)


def shares(pids: Mapping[int, int], before: Mapping[int, ThreadUse]) -> dict[int, float]:
    """The share of each rank's main thread, as far as it is measured, by rank.

    ``pids``: the process of each rank. ``before``: earlier measurements; ranks without one are measured now, and again
    after a second.
    """
    begun = {rank: _usable(before.get(rank), pid) or ThreadUse.now(pid) for rank, pid in pids.items()}
    if any(use is not None and time.monotonic() - use.at < _LEAST_S for use in begun.values()):
        time.sleep(_LEAST_S)
    measured = {}
    for rank, use in begun.items():
        now = ThreadUse.now(use.pid) if use is not None else None
        if use is not None and now is not None:
            measured[rank] = share(use, now, on_gpu=_is_on_gpu(use.pid))
    return measured


def _usable(use: ThreadUse | None, pid: int) -> ThreadUse | None:
    return use if use is not None and use.pid == pid else None


def _is_on_gpu(pid: int) -> bool:
    """Whether the process has one of NVIDIA's devices open."""
    try:
        return any(str(file.readlink()).startswith("/dev/nvidia") for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
