"""Processes by identity: process ids are reused, but not in combination with a start time and a boot.

Also signals: ones that are put off, and commands that finish their present work when they are interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# --- all processes of this machine as /proc shows them (proc(5)) ------------------------------------------------------

# States of a process that no longer runs: zombie, dead.
_ENDED_STATES = frozenset("ZX")
# Connections in /proc/PID/net/tcp; an address of IPv4 in one of IPv6.
_ESTABLISHED, _CLOSED, _LISTENING = "01", "07", "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_MAPPED = "0000000000000000FFFF0000"


@dataclass(frozen=True, slots=True)
class Entry:
    """A process. ``parent`` and ``session`` are process ids; ``start`` is in clock ticks since the machine's boot.

    ``ended``: it no longer runs, and only its parent has not noticed yet.
    """

    pid: int
    parent: int
    session: int
    start: int
    ended: bool


def read_entry(pid: int) -> Entry | None:
    """The process with this id; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # Field 3 is the state; then come the parent, the process group and the session; field 22 is the start time.
    rest = _fields(stat)
    return Entry(pid, int(rest[1]), int(rest[3]), int(rest[19]), rest[0].decode() in _ENDED_STATES)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by SIGSTOP, Ctrl-Z or a debugger: it does nothing until it is continued."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # By a signal, or by a debugger (proc(5)).
    return _fields(stat)[0] in (b"T", b"t")


def _fields(stat: bytes) -> list[bytes]:
    """The fields of a process from the third on, the state, as its ``stat`` file has them.

    The command's name before them is in parentheses and may contain anything, parentheses included.
    """
    return stat[stat.rindex(b")") + 2 :].split()


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """What a process uses.

    ``cpu_s``: the time that its threads have computed. ``own_bytes``: its anonymous resident memory; ``shared_bytes``:
    the rest, which are pages of files and shared memory.
    """

    cpu_s: float
    own_bytes: int
    shared_bytes: int


def use_of(pid: int) -> ResourceUse | None:
    """What a process uses now; None if it is gone."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat").read_bytes())
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_bytes().split())
    except (OSError, ValueError):
        return None
    page, ticks = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    # Fields 14 and 15 are the times in the process itself and in the kernel for it.
    return ResourceUse((int(fields[11]) + int(fields[12])) / ticks, (resident - shared) * page, shared * page)


def read_table() -> dict[int, Entry]:
    """All processes that can be seen from here, by id. It takes about 15 microseconds each."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    entries = (read_entry(pid) for pid in pids)
    return {entry.pid: entry for entry in entries if entry is not None}


def descend(table: Mapping[int, Entry], pid: int) -> list[Entry]:
    """The descendants of a process, parents before their children, ended ones included."""
    children: dict[int, list[Entry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    descendants: list[Entry] = []
    parents = [pid]
    # The list grows meanwhile: level by level, so that parents come first.
    for parent in parents:
        below = children.get(parent, [])
        descendants += below
        parents += [entry.pid for entry in below]
    return descendants


def marked_processes(variables: Iterable[str]) -> dict[int, dict[str, str]]:
    """Processes of this user that were started with one of these environment variables, and the values they had then.

    By process id, without this process. What a process has changed in its own environment since does not show.
    """
    prefixes = {name: f"{name}=".encode() for name in variables}
    by_pid: dict[int, dict[str, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # Somebody else's cannot be read, except by root, who must not touch them either.
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != os.getuid():  # noqa: PTH116
                continue
            words = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            values = {
                variable: os.fsdecode(word[len(prefix) :])
                for word in words
                for variable, prefix in prefixes.items()
                if word.startswith(prefix)
            }
            if values:
                by_pid[int(name)] = values
    return by_pid


def has_variable(pid: int, name: str) -> bool:
    """Whether a process was started with this environment variable; False if that cannot be seen."""
    return variable_of(pid, name) is not None


def program_of(pid: int) -> str:
    """The file name of the program that a process executes, such as ``bash``; empty if that cannot be seen."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")  # noqa: PTH115, PTH119
    return ""


def name_of(pid: int) -> str:
    """What a process calls itself, at most 15 characters; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def pipe_of(pid: int, stream: int) -> str | None:
    """The pipe that a process has as one of its standard streams (0 to 2); None if that is something else."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/{stream}")  # noqa: PTH115
        return target if target.startswith("pipe:") else None
    return None


def established(pid: int) -> dict[int, tuple[str, str]]:
    """The TCP connections in the network namespace of a process, by inode: the local and the remote end.

    These are the kernel's hexadecimal addresses, with their ports: they are compared, not read.
    """
    return {
        int(fields[9]): (fields[1].removeprefix(_MAPPED), fields[2].removeprefix(_MAPPED))
        for fields in _connections(pid)
        if fields[3] == _ESTABLISHED
    }


def was_connected(port: int) -> bool:
    """Whether one end of a TCP connection on this machine has a port, or had it within the last minute (TIME_WAIT)."""
    end = f":{port:04X}"
    return any(
        fields[3] not in (_LISTENING, _CLOSED) and (fields[1].endswith(end) or fields[2].endswith(end))
        for fields in _connections(os.getpid())
    )


def _connections(pid: int) -> Iterator[list[str]]:
    """The fields of each TCP connection in the network namespace of a process."""
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{family}").read_text(encoding="utf-8").splitlines()[1:]:
                yield line.split()


def sockets_of(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; none if that cannot be seen."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115
                if match is not None:
                    inodes.add(int(match[1]))
    return inodes


def has_loaded(pid: int, libraries: Iterable[str]) -> bool:
    """Whether a process has loaded a library in whose path one of these texts is."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_bytes()
        return any(library.encode() in maps for library in libraries)
    return False


def variable_of(pid: int, name: str) -> str | None:
    """The value of an environment variable with which a process was started; None if it had none."""
    prefix = f"{name}=".encode()
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(prefix):
                return os.fsdecode(word[len(prefix) :])
    return None


# --- processes by identity --------------------------------------------------------------------------------------------

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
    process = identify(os.getpid())
    assert process is not None
    return process


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


class StopSignal:
    """While this is entered, the first SIGTERM or SIGINT is only recorded in ``raised``; a second has its usual effect.

    A command that has work left to do when it is interrupted needs this: an exception raised at an arbitrary point may
    leave a registry transaction open, which locks the rest of the command out. Outside the main thread, which alone
    gets signals, it has no effect.
    """

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        # A wakeup descriptor: a signal that arrives between the check of ``raised`` and select() would not end the
        # latter, since Python retries it (PEP 475); a byte in the pipe does.
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            # signal.set_wakeup_fd() refuses a descriptor that blocks.
            os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {each: signal.signal(each, self._handle) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handlers:
            self._restore()
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the signal arrives; returns whether it has."""
        deadline = time.monotonic() + seconds
        while self.raised is None and (left := deadline - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left)[0]:
                # Any signal with a handler in Python leaves its byte, also one that does not end this wait.
                os.read(self._reader, 512)
        return self.raised is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.raised = signal.Signals(number)
        # Whoever presses Ctrl-C twice wants to be rid of a command that hangs in its last work.
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off a first SIGTERM or SIGINT until what is done here has succeeded; it then has its usual effect."""
    with StopSignal() as stop:
        yield
    # Not reached if the block raises: its exception ends the command anyway.
    if stop.raised is not None:
        signal.raise_signal(stop.raised)
