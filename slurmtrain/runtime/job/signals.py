"""Signals that ask a process to stop. Handlers only set a flag: the program reacts at a safe point."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable
from functools import cache
from types import FrameType

# SIGTERM: preemption, scancel, `slurmtrain cancel`. SIGUSR2: what submitit has Slurm send before the time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# The exit code of a process that did not exit in time: EX_PROTOCOL in sysexits.h. It counts as a failure, and as a
# consequence of the stop request if there was one.
FORCED = 76

# SCM_CREDENTIALS of unix(7): the pid, user and group of the writer.
_CREDENTIALS = struct.Struct("3i")
_STDERR = 2


class StopFlag:
    """Remembers stop signals: the first one, and how many there were.

    ``raised`` is the first, ``raised_at`` its time in seconds since 1970; both are None if there was none.
    """

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None
        self.raised_at: float | None = None
        self._first: dict[str, tuple[signal.Signals, float]] = {}
        self._handled: list[signal.Signals] = []
        self._heard: list[signal.Signals] = []
        self._numbers: tuple[signal.Signals, ...] = ()
        self._watch: _Watch | None = None

    @property
    def name(self) -> str | None:
        """The signal's name; None if there was none."""
        return None if self.raised is None else self.raised.name

    @property
    def count(self) -> int:
        """How many stop signals came; the kernel may have merged some."""
        # The thread reads about each, in order; but about none if it could not get the wakeup fd.
        return max(len(self._heard), len(self._handled))

    def install(self, *others: signal.Signals, forced_exit_s: float | None = None) -> None:
        """Handle the stop signals and these ``others``, in the main thread, and ignore the SIGCONT before a SIGTERM.

        Signals are noticed even while the main thread is in C code, where Python runs no handlers, unless other code
        has already set a wakeup fd (signal.set_wakeup_fd), which is kept. ``forced_exit_s``: this many seconds after
        the first signal the process writes the stacks of its threads to stderr and exits with FORCED. A thread does
        this, so C code that holds the interpreter's lock prevents it. System calls that a signal interrupts are
        restarted (SA_RESTART), since libraries may take an interruption for a failure.
        """
        self._numbers = (*STOP_SIGNALS, *others)
        self._watch = _Watch(self, self._numbers, forced_exit_s)
        self._watch.begin()
        self.reinstall()
        signal.signal(signal.SIGCONT, lambda *_: None)
        signal.siginterrupt(signal.SIGCONT, False)

        def ignore_late() -> None:
            # The interpreter restores the signals' default action at exit, and they would kill the process.
            for each in self._numbers:
                if signal.getsignal(each) == self._handle:
                    signal.signal(each, signal.SIG_IGN)

        atexit.register(ignore_late)

    def reinstall(self) -> None:
        """Handle again the signals for which other code, such as a trainer, has set handlers since :meth:`install`."""
        for each in self._numbers:
            if signal.getsignal(each) != self._handle:
                signal.signal(each, self._handle)
                signal.siginterrupt(each, False)

    def put_off_forced_exit(self) -> None:
        """Restart the countdown to the forced exit, since there is progress."""
        if self._watch is not None:
            self._watch.put_off()

    def release(self) -> None:
        """Cancel the forced exit, end the thread, and release the wakeup fd.

        The handlers stay, since a late signal must not kill a process that has done its work.
        """
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._note(number, self._handled)
        if self._watch is not None:
            self._watch.nudge()

    def hear(self, number: int) -> None:
        """Note a signal that the watching thread has read."""
        self._note(number, self._heard)

    def _note(self, number: int, signals: list[signal.Signals]) -> None:
        # The handler and the thread may get here at the same time: setdefault() lets one of them be first without a
        # lock, which a handler must not wait for.
        self.raised, self.raised_at = self._first.setdefault("first", (signal.Signals(number), time.time()))
        signals.append(signal.Signals(number))


class _Watch:
    """A thread that learns about signals at once: the C-level handler writes their numbers to a socket.

    The kernel adds the writer's pid, since a child has the socket and the handler too from fork() to exec().
    """

    # The watch that has the wakeup fd.
    current: _Watch | None = None

    def __init__(self, flag: StopFlag, numbers: Iterable[signal.Signals], forced_exit_s: float | None) -> None:
        self._flag = flag
        self._numbers = frozenset(numbers)
        self._seconds = forced_exit_s
        self._since: float | None = None
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._writer.setblocking(False)

    def begin(self) -> None:
        """Start the thread, and take the wakeup fd if it is free. Raises ValueError outside the main thread."""
        if _Watch.current is not None:
            _Watch.current.end()
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous == -1:
            _Watch.current = self
        else:
            signal.set_wakeup_fd(previous)
        _detach_children()
        threading.Thread(target=self._run, name="slurmtrain-signals", daemon=True).start()

    def end(self) -> None:
        """Release the wakeup fd and end the thread; outside the main thread, which owns the fd, only cancel() it."""
        self.cancel()
        if _Watch.current is self:
            try:
                self.detach()
            except ValueError:
                return
            _Watch.current = None
        if os.getpid() == self._pid:
            # Not close(): children have the socket too. The thread may already have ended.
            with contextlib.suppress(OSError):
                self._writer.shutdown(socket.SHUT_RDWR)

    def detach(self) -> None:
        """Unset the wakeup fd, if it is still this one. Raises ValueError outside the main thread."""
        fd = signal.set_wakeup_fd(-1)
        if fd not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(fd)

    def put_off(self) -> None:
        """Restart the countdown to the forced exit."""
        if self._since is not None:
            self._since = time.monotonic()
            self.nudge()

    def cancel(self) -> None:
        """Cancel the forced exit."""
        self._seconds = None
        self.nudge()

    def nudge(self) -> None:
        """Wake the thread, so that it checks again."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def _run(self) -> None:
        with self._reader, self._writer:
            while (heard := self._listen()) is not None:
                for number in heard:
                    if number in self._numbers:
                        self._flag.hear(number)
                if self._flag.raised is not None and self._since is None:
                    self._since = time.monotonic()

    def _listen(self) -> bytes | None:
        """What this process wrote next; b"" if it is time to check again, None at the end."""
        left = None
        if self._since is not None and self._seconds is not None:
            left = self._since + self._seconds - time.monotonic()
        if left is not None and left <= 0:
            self._leave()
        self._reader.settimeout(left)
        try:
            data, ancillary, _, _ = self._reader.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        except TimeoutError:
            return b""
        if not data:
            return None
        writers = {_CREDENTIALS.unpack(content)[0] for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS}
        return data if writers == {self._pid} else b""

    def _leave(self) -> None:
        message = f"slurmtrain: still running {self._seconds:g} s after {self._flag.name}; the stacks of all threads:\n"
        # Directly to the descriptor: the script may have replaced sys.stderr, and another thread may hold its lock.
        with contextlib.suppress(OSError):
            os.write(_STDERR, message.encode())
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(FORCED)


@cache
def _detach_children() -> None:
    """Make forked children release the wakeup fd, from now on."""

    def detach() -> None:
        if _Watch.current is not None:
            _Watch.current.detach()
            _Watch.current = None

    os.register_at_fork(after_in_child=detach)
