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

_GONE = frozenset("ZX")


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
        return cls(str(data["host"]), str(data["boot"]), int(data["pid"]), int(data["start"]))

    def alive(self) -> bool | None:
        """Whether it runs; None if that cannot be told from this machine."""
        if self.host != socket.gethostname():
            return None
        return self.boot == boot_id() and _start_of(self.pid) == self.start

    def send(self, signum: int) -> bool:
        """Send a signal to exactly this process; False if it is gone, or on another machine."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError), _pinned(self.pid) as kill:
            # Pinned now, whoever has the id: is it still the one that was meant?
            if self.alive():
                kill(signum)
                return True
        return False


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[Callable[[int], None]]:
    """Hold on to whoever has a process id now, and yield how to signal exactly that process.

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


def myself() -> Process:
    """The identity of this process."""
    process = identify(os.getpid())
    assert process is not None
    return process


def descendants(process: Process) -> list[Process]:
    """All processes below this one that still hang on it, on this machine."""
    import psutil

    if not process.alive():
        return []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
        return [found for child in children if (found := identify(child.pid)) is not None]
    return []


def with_argument(text: str) -> Iterator[tuple[Process, bytes]]:
    """Processes on this machine whose command line holds ``text``, each with that command line."""
    wanted = text.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if wanted in command and (found := identify(int(entry.name))):
                    yield found, command


@cache
def boot_id() -> str:
    """What tells this boot of the machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_of(pid: int, *, ended: bool = False) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name stands in brackets and may hold anything, brackets included.
    rest = stat[stat.rindex(b")") + 2 :].split()
    return None if rest[0].decode() in _GONE and not ended else int(rest[19])


@contextlib.contextmanager
def blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Keep these signals from this thread, and for good from what it starts meanwhile, which inherits the mask.

    This process gets them afterwards, if not in another thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
