"""Kills a command at a chosen effect: put this directory on PYTHONPATH.

An effect is anything that another process could see or that must not be lost: opening a file of the runs root, a
write, an fsync, a rename, a new or a removed directory entry, a subprocess, a SQLite commit. KILL_AT=N: die by
SIGKILL right before the N-th effect, counted from 1; KILL_NAME: count only effects of this name, since those of
several threads come in any order. KILL_LOG: a file that gets a line per effect. KILL_IN: the program to kill, as the
module that ``python -m`` runs.
"""

import os
import pathlib
import re
import signal
import sqlite3
import sqlite3.dbapi2
import sys
import threading

_CHANGES = {
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "subprocess.Popen",
    "os.posix_spawn",
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# Parts of names that differ between runs: ids of runs and jobs, random parts of temporary files, times, ports.
_OF_A_RUN = re.compile(r"(?<=/runs/)\w+|(?<=/proc/self/fd/)\d+|local-\w+|(?=\d*[a-f])[0-9a-f]{8,}|\d+(\.\d+)?")


class _Killer:
    def __init__(self) -> None:
        self.at = int(os.environ.get("KILL_AT", "0"))
        self.name = os.environ.get("KILL_NAME")
        self.log = os.environ.get("KILL_LOG")
        self.root = os.environ["KILL_ROOT"]
        self.count = 0
        self.lock = threading.Lock()
        self.busy = threading.local()

    def effect(self, name: str) -> None:
        if getattr(self.busy, "now", False):
            return
        self.busy.now = True
        try:
            # Other threads wait, so that nothing comes between the count and the end.
            with self.lock:
                self._count(name)
        finally:
            self.busy.now = False

    def _count(self, name: str) -> None:
        # What is written is cut only then: times and numbers are not always of the same length.
        plain = _OF_A_RUN.sub("*", name)
        if name.startswith("write"):
            plain = plain[:80]
        self.count += self.name in (None, plain)
        if self.log:
            with pathlib.Path(self.log).open("a") as file:
                file.write(f"{self.count} {plain}\n")
        if self.count == self.at and self.name in (None, plain):
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, os.PathLike)) and flags & _WRITING and str(path).startswith(self.root):
                self.effect(f"open {path}")
        elif event in _CHANGES:
            self.effect(f"{event} {arguments[0]}")


def watch_effects() -> None:
    """Let this process die as its variables say."""
    killer = _Killer()
    write, fsync, connect = os.write, os.fsync, sqlite3.dbapi2.connect

    def killing_write(handle: int, data: bytes) -> int:
        killer.effect(f"write {bytes(data[:120])!r}")
        return write(handle, data)

    def killing_fsync(handle: int) -> None:
        killer.effect(f"fsync {pathlib.Path(f'/proc/self/fd/{handle}').readlink()}")
        fsync(handle)

    class Connection(sqlite3.Connection):
        def commit(self) -> None:
            killer.effect("commit")
            super().commit()

    os.write, os.fsync = killing_write, killing_fsync
    sqlite3.dbapi2.connect = sqlite3.connect = lambda *args, **kwargs: connect(
        *args, **{**kwargs, "factory": Connection}
    )
    sys.addaudithook(killer.audit)


if ("-m", os.environ.get("KILL_IN")) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    watch_effects()
