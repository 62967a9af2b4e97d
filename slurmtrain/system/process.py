"""Processes by identity: process ids are reused, but not in combination with a start time and a boot."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from slurmtrain.system.process_table import Entry, descend, read_entry, read_table

# prctl(2).
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot of one machine. ``start`` is in clock ticks since that boot (proc(5), field 22)."""

    host: str
    boot: str
    pid: int
    start: int

    def to_dict(self) -> dict[str, Any]:
        """Its form in journals."""
        return {"host": self.host, "boot": self.boot, "pid": self.pid, "start": self.start}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Process:
        """The process that :meth:`to_dict` described. Raises KeyError, TypeError or ValueError for other ``data``."""
        return cls(str(data["host"]), str(data["boot"]), int(data["pid"]), int(data["start"]))

    def alive(self) -> bool | None:
        """Whether it is running; None if it is on another machine, where that cannot be seen."""
        if self.host != socket.gethostname():
            return None
        return self.boot == boot_id() and _start_of(self.pid) == self.start

    def send(self, signum: int) -> bool:
        """Send a signal to exactly this process; False if it is gone, or on another machine."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError), _pinned(self.pid) as kill:
            # Check again: before it was pinned, the process may have ended and another may have got its id.
            if self.alive():
                kill(signum)
                return True
        return False


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[Callable[[int], None]]:
    """Pin the process that now has this id, and yield a function that signals exactly that process.

    Linux before 5.3 cannot pin a process, so there the function uses the id alone. Raises ProcessLookupError.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        yield lambda signum: os.kill(pid, signum)
        return
    try:
        yield lambda signum: signal.pidfd_send_signal(handle, signum)
    finally:
        os.close(handle)


def identify(pid: int, *, ended: bool = False) -> Process | None:
    """The identity of a process on this machine; None if there is none.

    ``ended``: also identify a process that has ended but has not been reaped by its parent.
    """
    start = _start_of(pid, ended=ended)
    return None if start is None else Process(socket.gethostname(), boot_id(), pid, start)


def this_process() -> Process:
    """The identity of this process."""
    pid = os.getpid()
    return Process(socket.gethostname(), boot_id(), pid, _own_start(pid))


@lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    """When this process began, by its id: one that is forked off has another one."""
    start = _start_of(pid)
    assert start is not None
    return start


def descendants(process: Process) -> list[Process]:
    """All descendants of a process on this machine, except orphans that init has adopted."""
    if not process.alive():
        return []
    return [identity_of(entry) for entry in descend(read_table(), process.pid) if not entry.ended]


def identity_of(entry: Entry) -> Process:
    """The identity of an entry of the table of this machine's processes."""
    return Process(socket.gethostname(), boot_id(), entry.pid, entry.start)


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process, which so remains their ancestor (prctl(2)).

    This process must then reap them.
    """
    # Imported here: only node agents need it.
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes_with_argument(text: str) -> Iterator[tuple[Process, bytes]]:
    """Other processes on this machine whose command line contains ``text``, each with that command line.

    Each argument in it ends with a null byte (proc(5)).
    """
    argument = text.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if argument in command and (process := identify(int(entry.name))):
                    yield process, command


@cache
def boot_id() -> str:
    """An id of this boot of the machine (random(4)): start times count from the boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _start_of(pid: int, *, ended: bool = False) -> int | None:
    entry = read_entry(pid)
    return None if entry is None or (entry.ended and not ended) else entry.start


@contextlib.contextmanager
def block_signals(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Block these signals in this thread, and permanently in processes it starts meanwhile: they inherit the mask.

    A signal that arrives meanwhile is delivered afterwards, or to another thread that does not block it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
