"""Where the ranks of a node are: the stacks of their threads, for their logs and for judging which one hangs.

py-spy reads them from outside without stopping a rank, if it is installed and permitted: with a ``ptrace_scope`` of 1
(Yama), Ubuntu's default, it is not. Otherwise the rank writes them itself on a signal, with Python's faulthandler,
whatever its threads are doing, even in C code; a process that is stopped or in an uninterruptible sleep does not
answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.diagnosis.hang import Beat, RankState
from slurmtrain.system.owned_files import open_readable

# Real-time signals are unused unless a program uses them; the first few belong to the C library and debuggers.
SIGNAL = signal.SIGRTMIN + 12
# For all ranks together: logs may be on a file server that hangs too.
_PATIENCE_S = 12.0
_PY_SPY_S = 5.0
_ANSWER_S = 2.0
# A log that has not grown for this long contains the whole answer.
_QUIET_S = 0.2
_POLL_S = 0.02
_STDERR = 2
# Process states that do not answer, by their letters in proc(5): stopped by a signal or a debugger, uninterruptible,
# ended.
_MUTE = frozenset("TtDZX")


def answer() -> None:
    """Make this process write the stacks of its threads to standard error on :data:`SIGNAL`. Never raises."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(SIGNAL, file=_STDERR, all_threads=True, chain=False)


# --- of all ranks -----------------------------------------------------------------------------------------------------
def rank_states(
    node: int,
    beats: Mapping[int, Beat],
    pids: Mapping[int, int],
    logs: Mapping[int, Path],
    cpu: Mapping[int, float] | None = None,
) -> list[RankState]:
    """What is known about the ranks of this ``node``, by global rank; writes their stacks to their logs.

    ``beats``: their last heartbeats. ``pids``: the processes that the node agent started. ``logs``: the ranks' log
    files. ``cpu``: the part of a core that their main threads have used lately, where that is known. Takes seconds.
    Never raises.
    """
    stacks, now, cpu = collect_stacks(pids, logs, beats), time.monotonic(), cpu or {}
    return [
        RankState(
            rank=rank,
            node=node,
            step=beat.step,
            phase=beat.phase,
            idle_s=now - beat.at if beat.at else 0.0,
            state=state_of(beat.pid or pids.get(rank, 0)),
            stack=tuple(stacks.get(rank, ())),
            cpu=cpu.get(rank),
        )
        for rank, beat in beats.items()
    ]


def collect_stacks(
    pids: Mapping[int, int], logs: Mapping[int, Path], beats: Mapping[int, Beat]
) -> dict[int, list[str]]:
    """The stack of each rank's main thread, innermost first, each "file:line function"; empty if unknown.

    A rank's process is the process of its last beat (``beats``), or else the one started for it (``pids``), which may
    be a shell. The stacks of all threads are appended to ``logs``. Takes seconds. Never raises.
    """
    stacks: dict[int, list[str]] = {rank: [] for rank in pids}

    def look(log: Path) -> None:
        # One after the other, where ranks share a log: each answer is read back from its addition to the log.
        for rank in (rank for rank in pids if logs.get(rank) == log):
            beat = beats.get(rank)
            with contextlib.suppress(OSError, ValueError):
                stacks[rank] = _stack_of(rank, (beat.pid if beat else 0) or pids[rank], log)

    # Not an executor: if one of its threads never returned, this process could not end.
    threads = [threading.Thread(target=look, args=(log,), daemon=True) for log in dict.fromkeys(logs.values())]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(stacks)


def _stack_of(rank: int, pid: int, log: Path) -> list[str]:
    state, waits_in = state_of(pid), kernel_function(pid)
    place = f", in the kernel in {waits_in}" if waits_in else ""
    _append_to_log(log, f"slurmtrain: the threads of rank {rank} (process {pid}, state {state or 'unknown'}{place}):\n")
    threads = _by_py_spy(pid)
    if threads is not None:
        _append_to_log(log, format_threads(threads))
        stack = main_thread(threads, pid)
    else:
        stack = _by_faulthandler(pid, state, log)
    # For a rank that waits for a file server this is all there is; for others it says nothing.
    return stack or ([f"kernel:0 {waits_in}"] if waits_in and state == "D" else [])


# --- py-spy -----------------------------------------------------------------------------------------------------------
Threads = list[tuple[str, int | None, list[str]]]
"""The name of each thread, its kernel id if known, and its stack."""


def _by_py_spy(pid: int) -> Threads | None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return None
    try:
        dump = subprocess.run(
            [program, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return read_py_spy(dump.stdout) if dump.returncode == 0 else None


def read_py_spy(text: str) -> Threads | None:
    """Parse the output of ``py-spy dump --json``; None if it is not that."""
    try:
        return [
            (
                str(thread.get("thread_name") or ""),
                thread.get("os_thread_id"),
                [f"{each['filename']}:{each['line']} {each['name']}" for each in thread["frames"]],
            )
            for thread in json.loads(text)
        ] or None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def main_thread(threads: Threads, pid: int) -> list[str]:
    """The stack of the main thread, whose id is the process's; of the first thread if no id matches."""
    for name, number, stack in threads:
        if number == pid or name == "MainThread":
            return stack
    return threads[0][2] if threads else []


def format_threads(threads: Threads) -> str:
    """The threads as text for a log."""
    lines = []
    for name, number, stack in threads:
        lines.append(f"Thread {number} {name} (most recent call first):")
        lines += [f"  {frame}" for frame in stack]
    return "".join(f"{line}\n" for line in lines)


# --- faulthandler -----------------------------------------------------------------------------------------------------
def _by_faulthandler(pid: int, state: str, log: Path) -> list[str]:
    """Make the process write its stacks to its log, and read the main thread's back from there."""
    if not state or state in _MUTE or not _answers(pid):
        return []
    size = begin = log.stat().st_size
    os.kill(pid, SIGNAL)
    deadline = time.monotonic() + _ANSWER_S
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < deadline and (size == begin or now - quiet_since < _QUIET_S):
        time.sleep(_POLL_S)
        if (grown := log.stat().st_size) != size:
            size, quiet_since = grown, time.monotonic()
    with open_readable(log) as file:
        file.seek(begin)
        return read_faulthandler(file.read(size - begin).decode(errors="replace"))


_HEADER = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def read_faulthandler(text: str) -> list[str]:
    """The stack of the thread that received the signal, which is the main thread unless it blocks that.

    Other threads of the process may write between the lines. If there are several answers, the last one counts.
    """
    stack: list[str] = []
    is_current = False
    for line in text.splitlines():
        if header := _HEADER.match(line):
            is_current = header[1] == "Current thread"
            stack = [] if is_current else stack
        elif is_current and (frame := _FRAME.fullmatch(line)):
            stack.append(f"{frame[1]}:{0 if frame[2] == '???' else frame[2]} {frame[3]}")
    return stack


# --- the kernel -------------------------------------------------------------------------------------------------------
def state_of(pid: int) -> str:
    """The state of a process's main thread, as its letter in proc(5); empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The command's name is in parentheses and may contain anything, even parentheses.
    return stat.rpartition(b")")[2].strip()[:1].decode()


def kernel_function(pid: int) -> str:
    """The kernel function that a process sleeps in; empty if the kernel does not show it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
    return "" if name == "0" else name


def _answers(pid: int) -> bool:
    """Whether the process has a handler for the signal, which kills any process that has none."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _append_to_log(log: Path, text: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode(errors="replace"))
    finally:
        os.close(handle)


# --- how much the main threads of ranks have computed lately ----------------------------------------------------------
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
        except OSError:
            return None
        cpu_s = (int(stat[_USER]) + int(stat[_SYSTEM])) / _TICKS_PER_S
        # More precisely, and with the time that it was ready to run, where the kernel counts that.
        with contextlib.suppress(OSError, ValueError):
            running_ns, ready_ns, *_ = (thread / "schedstat").read_text().split()
            cpu_s = (int(running_ns) + int(ready_ns)) / 1e9 or cpu_s
        switches = [line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt_switches:")]
        return cls(pid, time.monotonic(), cpu_s, int(stat[_FAULTS]) + sum(map(int, switches)))


def share(before: ThreadUse, now: ThreadUse, *, on_gpu: bool) -> float:
    """The part of a core that a thread has used between two measurements, ``before`` and ``now``.

    0 for a process ``on_gpu`` whose thread has not once entered the kernel for it: a thread that waits for a GPU spins,
    in the CUDA driver, with all of a core.
    """
    if on_gpu and now.waits == before.waits:
        return 0.0
    return max(0.0, now.cpu_s - before.cpu_s) / max(now.at - before.at, 1e-3)


def cpu_shares(pids: Mapping[int, int], before: Mapping[int, ThreadUse]) -> dict[int, float]:
    """The share of each rank's main thread, as far as it is measured, by rank.

    ``pids``: the process of each rank. ``before``: earlier measurements; ranks without one are measured now, and again
    after a second.
    """
    begun = {}
    for rank, pid in pids.items():
        earlier = before.get(rank)
        begun[rank] = earlier if earlier is not None and earlier.pid == pid else ThreadUse.now(pid)
    if any(use is not None and time.monotonic() - use.at < _LEAST_S for use in begun.values()):
        time.sleep(_LEAST_S)
    measured = {}
    for rank, use in begun.items():
        now = ThreadUse.now(use.pid) if use is not None else None
        if use is not None and now is not None:
            on_gpu = False
            with contextlib.suppress(OSError):
                # It has one of NVIDIA's devices open.
                files = Path(f"/proc/{use.pid}/fd").iterdir()
                on_gpu = any(str(file.readlink()).startswith("/dev/nvidia") for file in files)
            measured[rank] = share(use, now, on_gpu=on_gpu)
    return measured
