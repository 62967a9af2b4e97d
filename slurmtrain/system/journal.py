"""Writing journals: one writer per file, and one write per line."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from slurmtrain.model.run.events.base import Payload, encode
from slurmtrain.model.run.layout import base32
from slurmtrain.system.files import fsync, share_file
from slurmtrain.system.owned_files import open_checked


class Journal:
    """An append-only file of events. The first event creates it, so a journal without events leaves no file."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """``durable``: fsync after each event; without it, events survive a kill, but not a power failure."""
        self.path = path
        self._durable = durable
        self._handle: int | None = None

    def write(self, event: Payload, *, durable: bool = True) -> float:
        """Append one event and return its time, in seconds since 1970.

        ``durable``: False: this one may be lost in a power failure, also in a durable journal.

        Raises OSError with nothing appended; UntrustedPath.
        """
        now = time.time()
        if self._handle is None:
            self._handle = open_appending(self.path)
        line = encode(now, event.kind, event.to_json())
        written = os.write(self._handle, line)
        try:
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError:
            # A full disk may take only the beginning of a line (write(2)). Nobody else writes to this file.
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
            raise
        if self._durable and durable:
            fsync(self._handle)
        return now

    def close(self) -> None:
        """Close the file; the next event reopens it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_appending(path: Path) -> int:
    """Open a file of lines for appending, first ending any line that a killed writer left unfinished.

    Raises OSError; UntrustedPath if the file, or its directory, is somebody else's.
    """
    handle = open_checked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(handle).st_size
    if not size:
        share_file(handle, path)
    elif os.pread(handle, 1, size - 1) != b"\n":
        os.write(handle, b"\n")
    return handle


def command_journal(directory: Path, command: str) -> Journal:
    """A new journal in ``directory`` for one ``command`` on the login node."""
    # Names sort by time; the rest keeps commands on different machines apart, which may have the same pid.
    stamp = base32(int(time.time() * 1000), 9)
    return Journal(directory / f"{command}-{stamp}-{os.getpid()}-{secrets.token_hex(4)}.jsonl")
