"""What the scheduler says of this job when a signal comes: asked once, while the ranks are already stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.stop_cause import JobView, budget, read_view, time_left

# How long an answer is waited for when there is nothing else left to do.
PATIENCE_S = 6.0


class JobQuery:
    """One question, in a thread of its own: whoever waits for Slurm does not keep ranks from stopping."""

    def __init__(self, ask: Callable[[], Mapping[str, str]] | None, grace_s: float | None) -> None:
        """``ask``: fields of the job's record; None where nobody can be asked. ``grace_s``: what the site leaves."""
        self._ask = ask
        self._grace_s = grace_s
        self._thread: threading.Thread | None = None
        self._view: JobView | None = None
        self._asked_at = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """Ask, if nobody has yet. The time that ranks have counts from the first call."""
        if self._began:
            return
        self._began = time.monotonic()
        if self._ask is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def view(self) -> JobView | None:
        """The answer, waited for for some seconds; None where there was none."""
        self.begin()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        return self._view

    def until(self) -> float:
        """Until when ranks may take to save and leave, by the monotonic clock, as far as it is known now."""
        self.begin()
        view = self._view
        if view is None:
            return self._began + budget(None, self._grace_s)
        left = time_left(view, self._asked_at)
        return self._began + budget(left, self._grace_s)

    def _run(self) -> None:
        assert self._ask is not None
        try:
            fields = self._ask()
        except SlurmtrainError:
            return
        self._asked_at = time.time() - (time.monotonic() - self._began)
        self._view = read_view(fields)
