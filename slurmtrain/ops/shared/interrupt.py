"""Commands that finish their present work when they are interrupted."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While this is entered, the first SIGTERM or SIGINT is only recorded in ``raised``; a second has its usual effect.

    A command that has work left to do when it is interrupted needs this: an exception raised at an arbitrary point may
    leave a registry transaction open, which locks the rest of the command out. Outside the main thread, which alone
    gets signals, it has no effect.
    """

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        # A wakeup descriptor: a signal that arrives between the check of ``raised`` and select() would not end the
        # latter, since Python retries it (PEP 475); a byte in the pipe does.
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            # signal.set_wakeup_fd() refuses a descriptor that blocks.
            os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {each: signal.signal(each, self._handle) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handlers:
            self._restore()
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the signal arrives; returns whether it has."""
        deadline = time.monotonic() + seconds
        while self.raised is None and (left := deadline - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left)[0]:
                # Any signal with a handler in Python leaves its byte, also one that does not end this wait.
                os.read(self._reader, 512)
        return self.raised is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.raised = signal.Signals(number)
        # Whoever presses Ctrl-C twice wants to be rid of a command that hangs in its last work.
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off a first SIGTERM or SIGINT until what is done here has succeeded; it then has its usual effect."""
    with StopSignal() as stop:
        yield
    # Not reached if the block raises: its exception ends the command anyway.
    if stop.raised is not None:
        signal.raise_signal(stop.raised)
