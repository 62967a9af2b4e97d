"""Keeps a rank's child processes from acting on the stop signals that Slurm sends to all processes of a step.

If a signal kills a worker of torch's data loader, the loader raises an error, and the rank fails just as it was about
to save. Without this module a rank whose DataLoader has workers would fail at each preemption, with any start method.
What :mod:`os` offers (register_at_fork) only helps with forks, and Python 3.14 does not fork by default.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import popen_fork, util
from multiprocessing.context import SpawnProcess
from multiprocessing.process import current_process, parent_process
from typing import Any
from weakref import WeakSet

from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.job.torch_private import LOADER_WORKERS
from slurmtrain.system.process import block_signals

# All signals that Slurm sends, by itself or on request, before a SIGKILL.
GUARDED = frozenset((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
# Python's handlers run in the main thread, whose system call this signal interrupts. By default it does nothing.
_POKE = signal.SIGURG
# The key of the guard that a process passes to new interpreters that it starts.
_CONFIG_KEY = "slurmtrain_guard"
# A new interpreter has its guard before it knows its program: this many seconds to wait for that.
_IDENTIFIED_S = 5.0


class ChildGuard:
    """Keeps signals from processes of ``multiprocessing``, unless their parent or the rank sends them.

    It takes effect when constructed, in the rank, and ends when it is garbage collected; children started meanwhile
    keep it. A child has the signals blocked, and a thread that receives them: what the parent sends has its usual
    effect, so ``Process.terminate()`` works. This holds for all start methods. The helper processes of
    ``multiprocessing``, its fork server and its resource tracker, only have the signals blocked.

    With ``loaders_only``, workers of torch's and torchdata's data loaders are guarded and no other children, such as
    processes of ``torch.multiprocessing.spawn`` that train, and may want to hear a signal to all processes.

    Processes that ``os.fork`` creates without ``multiprocessing``, and processes that ``subprocess`` starts, are not
    guarded: such processes of the rank are not affected at all. Such processes of a guarded child inherit its blocked
    signals, so they survive a SIGTERM, even from the child, and only SIGKILL ends them.
    """

    def __init__(self, rank: int | None = None, *, loaders_only: bool = False) -> None:
        """``rank``: the process id of the rank; None for this process. ``loaders_only``: guard only data loaders."""
        self._rank = os.getpid() if rank is None else rank
        self._loaders_only = loaders_only
        util.register_after_fork(self, ChildGuard._guard_fork)
        _guards.add(self)
        _watch_starts()
        # What multiprocessing copies to every process that this one starts (BaseProcess._config, as in Python 3.11).
        inherited: dict[str, Any] = vars(current_process()).get("_config", {})
        inherited[_CONFIG_KEY] = _PickledGuard(self._rank, loaders_only=loaders_only)

    def _guard_fork(self) -> None:
        """Guard a child, in its only thread, which has the signals blocked; so will all that it starts later."""
        if self._loaders_only:
            if not all(guard._loaders_only for guard in _guards):
                return  # another guard of this process is for all children
            if not _is_loader():
                _unblock(always=True)
                return
        _mask.before = None
        self.guard_process(os.getppid())

    def guard_process(self, parent: int) -> None:
        """Keep the signals from this process, which has them blocked, unless ``parent`` or the rank sends them."""
        for number in GUARDED:
            if isinstance(getattr(signal.getsignal(number), "__self__", None), StopFlag):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(_POKE) == signal.SIG_DFL:
            signal.signal(_POKE, lambda *_: None)
        senders = (parent, self._rank, os.getpid())

        def take() -> None:
            while True:
                info = signal.sigwaitinfo(GUARDED)
                if info.si_pid not in senders:
                    continue
                number = signal.Signals(info.si_signo)
                if number == signal.SIGTERM and _is_loader():
                    # Like torch's own handler for a SIGTERM from the parent: the loader reports any other end as a
                    # failure. Calling that handler would not do, since it would see this thread as the sender.
                    os._exit(0)
                # As if it were not blocked.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
                signal.raise_signal(number)
                signal.pthread_sigmask(signal.SIG_BLOCK, (number,))
                if callable(signal.getsignal(number)) and callable(signal.getsignal(_POKE)):
                    # Twice: if the main thread was just about to enter a system call when the first one arrived, it
                    # would block there.
                    for pause_s in (0.0, 0.02):
                        time.sleep(pause_s)
                        signal.pthread_kill(threading.main_thread().ident or 0, _POKE)

        threading.Thread(target=take, name="slurmtrain-guard", daemon=True).start()


def _is_loader() -> bool:
    """Whether this is a worker of torch's or torchdata's data loader, even if it has not begun to work."""
    deadline = time.monotonic() + _IDENTIFIED_S
    while parent_process() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    target = vars(current_process()).get("_target")
    return getattr(target, "__module__", None) in LOADER_WORKERS


# --- what a new interpreter begins with -----------------------------------------------------------------------------


class _PickledGuard:
    """The guard as multiprocessing sends it to a process that it starts: unpickling it there installs the guard."""

    def __init__(self, rank: int, *, loaders_only: bool) -> None:
        self._rank = rank
        self._loaders_only = loaders_only

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int, ...]]:
        return (_received, (os.getpid(), self._rank, self._loaders_only)) if _guards else (int, ())


# Keeps the guards that this process received from being garbage collected.
_kept: list[ChildGuard] = []


def _received(parent: int, rank: int, loaders_only: bool = False) -> _PickledGuard:
    guard = ChildGuard(rank, loaders_only=loaders_only)
    if loaders_only:
        # Whether this is a data loader's worker is known only once multiprocessing has read what this process is to
        # run. What is registered for forks is called then, unless the start method is spawn.
        SpawnProcess._after_fork = staticmethod(guard._guard_fork)  # type: ignore[attr-defined]
    else:
        guard.guard_process(parent)
    _kept.append(guard)
    return _PickledGuard(rank, loaders_only=loaders_only)


# --- around a start -------------------------------------------------------------------------------------------------

_guards: WeakSet[ChildGuard] = WeakSet()


class _Mask(threading.local):
    """The signals that this thread had blocked before it forks a child that is to be guarded."""

    before: set[int] | None = None


_mask = _Mask()


@cache
def _watch_starts() -> None:
    def block() -> None:
        """Block the signals, so that the child starts that way: its parent may end it before it has run at all.

        Other forks are left alone, such as subprocess.Popen's with preexec_fn, whose command would inherit the mask.
        """
        frame = inspect.currentframe()
        forking = frame.f_back if frame is not None else None
        if _guards and forking is not None and forking.f_globals.get("__name__") == popen_fork.__name__:
            _mask.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED))

    os.register_at_fork(before=block, after_in_parent=_unblock)
    if "_config" not in vars(current_process()):
        return  # without a guard, a child that blocks the signals could not be ended by its parent
    plain = util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """Multiprocessing's function that starts new interpreters, which inherit the blocked signals."""
        if not _guards:
            return plain(path, args, passfds)
        with block_signals(GUARDED):
            return plain(path, args, passfds)

    util.spawnv_passfds = spawnv_passfds


def _unblock(*, always: bool = False) -> None:
    """Let this thread have the signals again as before the fork, or ``always`` if it did not block them then."""
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    elif always:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED)
