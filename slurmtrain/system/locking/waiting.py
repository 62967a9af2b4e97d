"""Waiting for something that another process holds: announced after two seconds, then rarely, and not for ever."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# How long commands wait for a lock: locked operations take less than a second, unless a file server or Slurm is slow.
LIMIT_S = 60.0
# Shorter waits are normal where several commands work at once, and not worth a line.
NOTICE_S = 2.0
_NEXT_NOTICE_S = 60.0
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.25


_receiver: ContextVar[Callable[[str], None] | None] = ContextVar("receiver of notices", default=None)


@contextlib.contextmanager
def notices_to(receive: Callable[[str], None]) -> Iterator[None]:
    """Within this context, and in this thread, ``receive`` is called with each notice, and nothing is printed."""
    token = _receiver.set(receive)
    try:
        yield
    finally:
        _receiver.reset(token)


class Waiting:
    """One wait: call :meth:`pause` between two tries. A signal such as Ctrl-C ends it, as it ends a sleep."""

    def __init__(self, limit_s: float, describe: Callable[[], str]) -> None:
        """The wait begins now, and ends after ``limit_s`` seconds.

        ``describe``: what is waited for, and who holds it; called only for a notice, since it may take a moment.
        """
        now = time.monotonic()
        self._ends_at = now + limit_s
        self._notice_at = now + NOTICE_S
        self._pause_s = _FIRST_PAUSE_S
        self._describe = describe

    def pause(self) -> bool:
        """Sleep for a moment, after a notice if one is due; False, without sleeping, if the wait is over."""
        now = time.monotonic()
        if now >= self._ends_at:
            return False
        if now >= self._notice_at:
            self._notice_at = now + _NEXT_NOTICE_S
            print_notice(f"waiting for {self._describe()}")
        time.sleep(min(self._pause_s, self._ends_at - now))
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        return True


def print_notice(text: str) -> None:
    """Print a line to standard error, now: the command may be ended before it prints anything else.

    Within :func:`notices_to`, it goes there instead.
    """
    receive = _receiver.get()
    if receive is not None:
        receive(text)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
