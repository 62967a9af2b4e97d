"""How much memory processes and all their descendants take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SAMPLE_S = 0.05
# A rank's descendants are looked up again only once per this many samples: that takes longer than reading.
LOOK_UP = 5


class Failed(Exception):
    """A way to save failed; the message says how."""


class Memory:
    """Memory of processes and of all below them that is not a file's, sampled while this is entered.

    Their private memory (RssAnon in /proc/<pid>/status, see proc(5)) and the machine's shared memory (Shmem in
    /proc/meminfo), which holds memfds also where nobody maps them. Both are counters, which cost little to read, while
    the proportional share of a process (PSS) is counted page by page, and keeps it from getting more of them.
    """

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self, since: float) -> int:
        """Bytes of the highest sample beyond the last one before this time of the monotonic clock."""
        before = [held for at, held in self._samples if at <= since]
        after = [held for at, held in self._samples if at > since]
        if not before or not after:
            raise Failed("it ended before its memory was measured")
        return max(after) - before[-1]

    def _sample(self) -> None:
        number, pids = 0, set(self._roots)
        while not self._ended.wait(SAMPLE_S):
            if number % LOOK_UP == 0:
                pids = {pid for root in self._roots for pid in _tree(root)}
            held = sum(_kilobytes(f"/proc/{pid}/status", "RssAnon:") for pid in pids)
            self._samples.append((time.monotonic(), (held + _kilobytes("/proc/meminfo", "Shmem:")) * 1024))
            number += 1


def _tree(root: int) -> Iterator[int]:
    yield root
    with contextlib.suppress(psutil.Error):
        yield from (child.pid for child in psutil.Process(root).children(recursive=True))


def _kilobytes(path: str, name: str) -> int:
    """One value from a file of /proc; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
