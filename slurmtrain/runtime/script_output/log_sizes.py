"""Notes of how long logs were at what time, by which ``logs --since`` finds lines: logs have no times of their own."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.system.files import FILE_MODE

# Twenty thousand lines a week, if the logs grow all the time.
_EVERY_S = 30.0


class LogSizes:
    """Appends a line whenever the logs of a node have grown, at most every half minute.

    Nothing depends on these notes, so that what cannot be written is left out.
    """

    def __init__(self, notes: Path, logs: Mapping[str, Path], every_s: float = _EVERY_S) -> None:
        """Note the sizes of ``logs``, by name, in the file ``notes``, at most every ``every_s`` seconds."""
        self._notes = notes
        self._logs = logs
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Append a line if it is time to, and something has grown. Call it repeatedly."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        grown = {}
        for name, path in self._logs.items():
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                if size != self._sizes.get(name, 0):
                    grown[name] = size
        if grown:
            self._sizes |= grown
            line = json.dumps({"t": round(time.time(), 3), "sizes": grown}) + "\n"
            with contextlib.suppress(OSError):
                handle = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
                try:
                    os.write(handle, line.encode())
                finally:
                    os.close(handle)
