"""Child processes of a rank, which are not to act on the stop signals that Slurm sends to all processes of a step.

Torch's data loader gives up with an error when one of its workers dies of a signal, and with it the rank, which was
about to save.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from functools import cache
from multiprocessing import popen_fork
from multiprocessing.util import register_after_fork
from weakref import WeakSet

from torch.utils.data import get_worker_info

from slurmtrain.runtime.signals import StopFlag

# All that Slurm is asked to send, and sends by itself, before a SIGKILL.
GUARDED = frozenset((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
# Python's handlers run in the main thread, which this gets out of a call of the system. Its default is to do nothing.
_POKE = signal.SIGURG


class ChildGuard:
    """Keeps these signals from processes that ``multiprocessing`` forks, unless their parent or the rank sends them.

    It begins with its construction, in the rank, and ends when it is no longer referred to; children that were forked
    meanwhile keep it. A child has the signals blocked, and a thread that takes them: what the parent sends has its
    usual effect, so that ``Process.terminate()`` works.

    Not guarded: what ``os.fork`` makes without ``multiprocessing``; what ``subprocess`` starts, which is not changed in
    any way where the rank starts it; and processes of the start methods ``spawn`` and ``forkserver`` (the default of
    Python 3.14 and later), which begin as a new interpreter, and die of the signals. What a guarded child starts
    inherits its blocked signals: it, too, outlives a SIGTERM, also one from the child, and is to be ended by SIGKILL.
    """

    def __init__(self) -> None:
        self._rank = os.getpid()
        register_after_fork(self, ChildGuard._stand)
        _guards.add(self)
        _watch_forks()

    def _stand(self) -> None:
        """In the child, in its only thread, which has the signals blocked: those that it starts later inherit that."""
        _mask.before = None
        for each in GUARDED:
            if isinstance(getattr(signal.getsignal(each), "__self__", None), StopFlag):
                signal.signal(each, signal.SIG_DFL)
        if signal.getsignal(_POKE) == signal.SIG_DFL:
            signal.signal(_POKE, lambda *_: None)
        threading.Thread(target=self._take, name="slurmtrain-guard", daemon=True).start()

    def _take(self) -> None:
        heeded = (os.getppid(), self._rank, os.getpid())
        while True:
            taken = signal.sigwaitinfo(GUARDED)
            if taken.si_pid in heeded:
                _act(signal.Signals(taken.si_signo))


def _act(number: signal.Signals) -> None:
    """Do what the signal does where it is not blocked."""
    if number == signal.SIGTERM and get_worker_info() is not None:
        # As torch's own handler does when the parent asks: any other end is reported as a failure of the loader. Its
        # handler would take this thread for the sender.
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, (number,))
    if callable(signal.getsignal(number)) and callable(signal.getsignal(_POKE)):
        signal.pthread_kill(threading.main_thread().ident or 0, _POKE)


# --- around a fork --------------------------------------------------------------------------------------------------

_guards: WeakSet[ChildGuard] = WeakSet()


class _Mask(threading.local):
    """What this thread had blocked before it began to fork a child that is to be guarded."""

    before: set[int] | None = None


_mask = _Mask()


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_block, after_in_parent=_unblock)


def _block() -> None:
    """Have the child begin with the signals blocked: its parent may end it before it has run at all.

    Not where it is another's fork, as subprocess.Popen's with preexec_fn, whose command would inherit the mask.
    """
    frame = inspect.currentframe()
    forking = frame.f_back if frame is not None else None
    if _guards and forking is not None and forking.f_globals.get("__name__") == popen_fork.__name__:
        _mask.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED))


def _unblock() -> None:
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
