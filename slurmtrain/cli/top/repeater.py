"""A thread that does something again and again, for a page that must answer keys meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeater(threading.Thread):
    """Calls a function, waits, and calls it again, until it is stopped.

    It is a daemon: whoever leaves the page does not wait for a call that waits for Slurm.
    """

    def __init__(self, action: Callable[[], None], interval_s: float) -> None:
        """``action``: must not raise. ``interval_s``: seconds between the end of a call and the next."""
        super().__init__(daemon=True)
        self._action = action
        self._interval_s = interval_s
        self._woken = threading.Event()
        self._is_over = False

    def run(self) -> None:
        """Repeat the action."""
        while not self._is_over:
            self._woken.clear()
            self._action()
            self._woken.wait(self._interval_s)

    def wake(self) -> None:
        """Have the action called now, or again after the call that is under way."""
        self._woken.set()

    def stop(self, patience_s: float) -> None:
        """End after the call that is under way; wait ``patience_s`` seconds for that, no longer."""
        self._is_over = True
        self._woken.set()
        if self.is_alive():
            self.join(patience_s)
