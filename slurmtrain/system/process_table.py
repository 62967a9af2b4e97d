"""All processes of this machine as /proc shows them (proc(5)): the parent, session and command of each."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    return _fields(stat)[0] in (b"T", b"t")


def _fields(stat: bytes) -> list[bytes]:
    """The fields of a process from the third on, the state, as its ``stat`` file has them.

    The command's name before them is in parentheses and may contain anything, parentheses included.
    """
    return stat[stat.rindex(b")") + 2 :].split()


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
    for parent in parents:
        below = children.get(parent, [])
        descendants += below
        parents += [entry.pid for entry in below]
    return descendants


def marked(variables: Iterable[str]) -> dict[int, dict[str, str]]:
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
        int(fields[9]): (_plain(fields[1]), _plain(fields[2]))
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


def _plain(end: str) -> str:
    return end.removeprefix(_MAPPED)
