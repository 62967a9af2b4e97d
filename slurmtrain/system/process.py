"""Processes by identity: a process id is reused, a process id with its start time and boot is not."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

# States of proc(5) in which a process runs no more: zombie, dead.
_ENDED_STATES = frozenset("ZX")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot of one machine. ``start`` is in clock ticks since that boot (proc(5), field 22)."""

    host: str
    boot: str
    pid: int
    start: int

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a journal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Process:
        """From what :meth:`to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(str(data["host"]), str(data["boot"]), int(data["pid"]), int(data["start"]))

    def alive(self) -> bool | None:
        """Whether it runs; None if it is on another machine, where this one cannot see it."""
        if self.host != socket.gethostname():
            return None
        return self.boot == boot_id() and _start_of(self.pid) == self.start

    def send(self, signum: int) -> bool:
        """Send a signal to exactly this process; False if it is gone, or on another machine."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError), _pinned(self.pid) as kill:
            # Between the first look and the pin the process may have ended, and another got its id: look again.
            if self.alive():
                kill(signum)
                return True
        return False


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[Callable[[int], None]]:
    """Hold on to the process that has an id now, and yield a function that signals exactly that process.

    Linux before 5.3 cannot hold on to a process: there the id alone has to do. Raises ProcessLookupError.
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

    ``ended``: also of one that has ended but that its parent has not taken note of yet.
    """
    start = _start_of(pid, ended=ended)
    return None if start is None else Process(socket.gethostname(), boot_id(), pid, start)


def this_process() -> Process:
    """The identity of this process."""
    process = identify(os.getpid())
    assert process is not None
    return process


def descendants(process: Process) -> list[Process]:
    """All processes below this one, on this machine; not those whose parent has ended, which init has adopted."""
    # Here, for commands that never need it: importing it takes 15 ms.
    import psutil

    if not process.alive():
        return []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
        identities = [identify(child.pid) for child in children]
        return [identity for identity in identities if identity is not None]
    return []


def processes_with_argument(text: str) -> Iterator[tuple[Process, bytes]]:
    """Processes on this machine whose command line holds ``text``, each with that command line, but for this process.

    Arguments in it are ended by null bytes (proc(5)).
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
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_of(pid: int, *, ended: bool = False) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name stands in brackets and may hold anything, brackets included.
    rest = stat[stat.rindex(b")") + 2 :].split()
    # Of what follows the name, field 3 is the state and field 22 the start time (proc(5)).
    return None if rest[0].decode() in _ENDED_STATES and not ended else int(rest[19])


@contextlib.contextmanager
def block_signals(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Keep these signals from this thread, and for good from what it starts meanwhile, which inherits the mask.

    A signal that comes in between is delivered afterwards, or to another thread that does not block it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
