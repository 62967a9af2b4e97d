"""How much memory a process and all its descendants take."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil

SAMPLE_S = 0.05
# Descendants are looked up again only once per this many samples: that takes longer than reading.
LOOK_UP = 5


class Failed(Exception):
    """A way to save failed; the message says how."""


class Memory:
    """Memory of a process and of all below it that is not a file's, sampled while this is entered.

    Their private memory and the machine's shared memory, which holds memfds also where nobody maps them. Both are
    counters, which cost little to read, while the proportional share of a process (PSS) is counted page by page, and
    keeps it from getting more of them.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
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
        number, processes = 0, [self._root]
        while not self._ended.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                if number % LOOK_UP == 0:
                    processes = [self._root, *self._root.children(recursive=True)]
            held = psutil.virtual_memory().shared
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    memory = process.memory_info()
                    held += memory.rss - memory.shared
            self._samples.append((time.monotonic(), held))
            number += 1
