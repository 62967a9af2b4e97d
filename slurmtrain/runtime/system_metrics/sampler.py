"""Notes of how busy a node is, in a file of its own, while its ranks train.

A line is ``{"t": seconds since 1970, "step": finished steps, "metrics": {name: number}}``; without ``step`` as long as
no rank of the node has a heartbeat. Nothing depends on these notes: what cannot be measured or written is left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from slurmtrain.system.files import FILE_MODE

_EVERY_S = 15.0
# So many lines are as far apart; the next as many are twice as far. A month has about 7,500 lines, or 2 MB.
_EQUAL = 1000
# A driver or file system that hangs must not keep the agent from ending.
_END_S = 1.0


class Source(Protocol):
    """What measures a node."""

    def read(self) -> Mapping[str, float]:
        """The figures now, by name."""

    def close(self) -> None:
        """Release the resources that it uses."""


class Sampler:
    """Measures in a thread of its own, since a driver may take long to answer; use it as a context."""

    def __init__(
        self, path: Path, gauges: Callable[[], Source], step: Callable[[], int | None], every_s: float = _EVERY_S
    ) -> None:
        """Prepare to measure.

        Args:
            path: The file to append to, in a folder that exists.
            gauges: Makes what measures, in the thread.
            step: Returns how many steps are finished; None if that is unknown.
            every_s: Seconds between two lines at first.
        """
        self._path = path
        self._gauges = gauges
        self._step = step
        self._every_s = every_s
        self._last_step: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        # Libraries of drivers raise anything, and no figure is worth a traceback among the agent's output.
        with suppress(Exception):
            gauges = self._gauges()
            try:
                self._measure(gauges)
            finally:
                gauges.close()

    def _measure(self, gauges: Source) -> None:
        every_s, lines = self._every_s, 0
        while not self._ended.wait(every_s):
            self._append(gauges.read())
            lines += 1
            if lines % _EQUAL == 0:
                every_s *= 2

    def _append(self, metrics: Mapping[str, float]) -> None:
        # Ranks that are about to be started have no heartbeat yet: a step never goes back to unknown.
        self._last_step = step if (step := self._step()) is not None else self._last_step
        at = {} if self._last_step is None else {"step": self._last_step}
        line = json.dumps({"t": round(time.time(), 3), **at, "metrics": metrics}) + "\n"
        with suppress(OSError):
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
