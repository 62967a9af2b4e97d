"""Who holds a lock: what the holder has written into the lock's file, and what the kernel knows about its processes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.system.process import Process, this_process
from slurmtrain.system.process_table import is_stopped

# More than the record of any holder has.
_RECORD_BYTES = 4096
_COMMAND_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds, or held, a lock. ``since``: seconds since 1970."""

    process: Process
    command: str
    user: str
    since: float

    def to_dict(self) -> dict[str, Any]:
        """Its form in lock files."""
        return {**self.process.to_dict(), "command": self.command, "user": self.user, "since": self.since}

    def __str__(self) -> str:
        pid = self.process.pid
        state = ", which is stopped" if self.process.alive() and is_stopped(pid) else ""
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
        return f"{self.command!r} of {self.user}@{_printable(self.process.host)}, process {pid}{state}, since {began}"


def this_holder() -> Holder:
    """This process, from now on."""
    user = os.environ.get("USER") or str(os.getuid())
    return Holder(this_process(), _this_command(), user, time.time())


def _this_command() -> str:
    """The program and its subcommand, without the arguments, which may contain secrets."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    words = iter(sys.argv[1:])
    for word in words:
        if word == "--runs":
            next(words, None)
        elif not word.startswith("-"):
            return f"{name} {word}"
    return name


def read_record(text: bytes) -> Holder | None:
    """The holder that the ``text`` of a lock file names; None if it names none, whatever else it is."""
    try:
        # A killed process may have left the end of an earlier, longer record.
        record = json.loads(text.partition(b"\n")[0])
        command, user = _printable(record["command"]), _printable(record["user"])
        return Holder(Process.from_dict(record), command, user, float(record["since"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_record(handle: int, holder: Holder) -> None:
    """Write who holds the lock into its file, which is open as ``handle``. A full disk does not prevent a lock."""
    # In place: the lock belongs to the file, and a new file with this name would not have it. Cut afterwards: ext4
    # writes a file that was emptied to the disk once it is closed (ext4(5), auto_da_alloc), in milliseconds.
    content = json.dumps(holder.to_dict()).encode() + b"\n"
    with contextlib.suppress(OSError):
        os.pwrite(handle, content, 0)
        os.ftruncate(handle, len(content))


def describe_holder(path: Path, handle: int) -> str:
    """Who holds the kernel's lock on the file at ``path``, open as ``handle``, as the end of a sentence."""
    holder = read_record(os.pread(handle, _RECORD_BYTES, 0))
    if holder is not None and holder.process.alive() is not False:
        return f"held by {holder}"
    # The holder's lock belongs to the processes that it has started too, and they may outlive it.
    others = describe_lockers(path)
    left = f", left by {holder.command!r}" if holder is not None and others else ""
    return f"held by {others}{left}" if others else "held by another process, which cannot be seen from here"


def describe_lockers(path: Path) -> str:
    """The processes on this machine that have a lock on a file, in words; empty if none can be seen."""
    return ", ".join(_describe(pid) for pid in _lockers(path))


def _describe(pid: int) -> str:
    state = ", which is stopped" if is_stopped(pid) else ""
    words = b""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    command = _printable(words.replace(b"\0", b" ").decode(errors="replace").strip())
    return f"process {pid} ({command[:_COMMAND_CHARACTERS]}){state}"


def _lockers(path: Path) -> Iterator[int]:
    """Ids of the other processes that have a lock, of any kind, on a file (proc(5), "/proc/pid/fdinfo")."""
    target = os.path.realpath(path)
    for name in os.listdir("/proc"):
        # Another user's processes cannot be examined.
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and _locks(f"/proc/{name}", target):
                yield int(name)


def _locks(process: str, target: str) -> bool:
    for number in os.listdir(f"{process}/fd"):
        with contextlib.suppress(OSError):
            is_open = os.readlink(f"{process}/fd/{number}") == target  # noqa: PTH115
            if is_open and "\nlock:" in Path(f"{process}/fdinfo/{number}").read_text(encoding="utf-8"):
                return True
    return False


def _printable(text: object) -> str:
    """Text that may go to a terminal: a lock file may contain anything."""
    return "".join(character for character in str(text) if character.isprintable())
