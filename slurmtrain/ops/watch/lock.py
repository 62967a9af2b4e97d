"""One watch per runs root: the file that the watching process locks, and which identifies that process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.query.fields import iso
from slurmtrain.system.locks import open_lock, try_flock
from slurmtrain.system.owned_files import read_checked
from slurmtrain.system.process import Process, this_process

# Where locks do not work, a watch that has not touched its file for this many pauses is considered gone.
_SILENT_PAUSES = 3


@dataclass(frozen=True, slots=True)
class WatchHolder:
    """Who watches a runs root, according to the file. ``process``: None if the file does not say.

    ``since``: ISO 8601, UTC. ``every``: seconds between two rounds.
    """

    process: Process | None = None
    since: str = ""
    every: float = 0.0

    @property
    def host(self) -> str:
        """The machine that it is on; empty if the file does not say."""
        return self.process.host if self.process is not None else ""

    def __str__(self) -> str:
        if self.process is None:
            return "another process"
        return f"process {self.process.pid} on {self.process.host}, since {self.since}"


class WatchLock:
    """The lock of a runs root: this process holds it, or ``other`` does."""

    def __init__(self, other: WatchHolder | None, handle: int = -1) -> None:
        self.other = other
        self._handle = handle

    def record_holder(self, every_s: float) -> None:
        """Write that this process watches: for users, and for machines that do not see the kernel's lock."""
        holder = {**this_process().to_dict(), "since": iso(time.time()), "every": every_s}
        self._write(json.dumps(holder, indent=1).encode() + b"\n")

    def touch(self) -> None:
        """Show that this process is still there."""
        with contextlib.suppress(OSError):
            os.utime(self._handle)

    def clear_holder(self) -> None:
        """Write that there is no watch any more."""
        self._write(b"")

    def _write(self, content: bytes) -> None:
        # In place: the lock belongs to the inode, and a new file with this name would not have it. A full disk does not
        # prevent a watch.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, content, 0)


@contextlib.contextmanager
def watch_lock(path: Path, every_s: float) -> Iterator[WatchLock]:
    """Take the lock at ``path`` for a watch with rounds ``every_s`` seconds, if no other watch has it.

    The kernel's lock decides. It may not work between machines, and some file systems have none (ENOLCK): then what the
    file says about its writer, and how long ago it was touched, decide whether that process still watches.

    Raises PathError if the file cannot be written, or is somebody else's.
    """
    with open_lock(path) as handle:
        is_ours = try_flock(handle)
        holder = read_holder(path)
        if is_ours is False:
            yield WatchLock(holder or WatchHolder())
        elif holder is not None and _is_alive(holder, path, has_locks=is_ours is not None):
            yield WatchLock(holder)
        else:
            lock = WatchLock(None, handle)
            lock.record_holder(every_s)
            try:
                yield lock
            finally:
                lock.clear_holder()


def read_holder(path: Path) -> WatchHolder | None:
    """The holder that the file names; None if it names none, whatever else is in it."""
    try:
        data = json.loads(read_checked(path))
        return WatchHolder(Process.from_dict(data), str(data["since"]), float(data["every"]))
    except (OSError, PathError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_alive(holder: WatchHolder, path: Path, *, has_locks: bool) -> bool:
    """Whether the holder named by the file still watches, given that this process could open the file."""
    if holder.host == socket.gethostname():
        # If locks work, we have the lock, so no other process on this machine does.
        if has_locks or holder.process is None or holder.process == this_process():
            return False
        return holder.process.alive() is True
    try:
        # The holder's clock may be ahead of ours.
        silent_s = abs(time.time() - path.stat().st_mtime)
    except OSError:
        return False
    return silent_s < _SILENT_PAUSES * holder.every
