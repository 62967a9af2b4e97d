"""Signals that ask a process to stop. Handlers only set a flag: what to do about it is decided at a safe point."""

from __future__ import annotations

import signal
from types import FrameType

# SIGTERM: preemption, scancel, `slurmtrain cancel`. SIGUSR2: what submitit asks Slurm to send before the time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """Remembers the first stop signal; more of them change nothing."""

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None

    @property
    def name(self) -> str | None:
        """The signal's name; None as long as there was none."""
        return None if self.raised is None else self.raised.name

    def install(self, *others: signal.Signals) -> None:
        """Take over the stop signals and these others, in the main thread; SIGCONT before a SIGTERM is ignored."""
        for each in (*STOP_SIGNALS, *others):
            signal.signal(each, self._handle)
        signal.signal(signal.SIGCONT, lambda *_: None)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.raised is None:
            self.raised = signal.Signals(number)
