"""The loop of a watch: rounds until it is told to stop.

Only what was reported is kept between rounds, so a process that lives for months does not grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmtrain.config import Config
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.shared.interrupt import StopSignal
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.watch.lock import WatchHolder, WatchLock, watch_lock
from slurmtrain.ops.watch.report import ReportFilter, WatchEvent
from slurmtrain.ops.watch.rounds import do_round

# While Slurm is down, the pause doubles with each round, up to this many times the usual one.
MOST_PAUSES = 10

Report = Callable[[WatchEvent], None]


def watch(config: Config, every_s: float, report: Report, stop: StopSignal) -> WatchHolder | None:
    """Do rounds until told to stop, unless another process already watches.

    Args:
        config: names the runs root.
        every_s: seconds between the end of a round and the next one; more while Slurm is down.
        report: called with each event.
        stop: ends the watch after the current round.

    Returns:
        The process that already watches, if there is one; nothing was done then.

    Raises:
        PathError: the runs root cannot be written. Only before the first round: later this is an event.
    """
    Workspace(config).prepare()
    with watch_lock(RunsRoot(config.runs).watch_lock, every_s) as lock:
        if lock.other is not None:
            return lock.other
        report(WatchEvent(time.time(), "watching", f"watching {config.runs} every {every_s:g} s"))
        rounds = WatchRounds(config, report)
        while not stop.raised:
            rounds.next()
            _rest(rounds.pause_s(every_s), every_s, lock, stop)
        report(WatchEvent(time.time(), "stopped", f"stopped by {stop.raised.name}; runs go on"))
    return None


def watch_once(config: Config, every_s: float, report: Report) -> WatchHolder | None:
    """Do a single round, for example from cron, unless another process already watches.

    Args:
        config: names the runs root.
        every_s: how often this is called, for watches on other machines, which may not see our lock.
        report: called with each event.

    Returns:
        The process that already watches, if there is one; nothing was done then.

    Raises:
        PathError: the runs root cannot be written.
    """
    Workspace(config).prepare()
    with watch_lock(RunsRoot(config.runs).watch_lock, every_s) as lock:
        if lock.other is None:
            WatchRounds(config, report).next()
        return lock.other


class WatchRounds:
    """The rounds of one watch: each reports what is new since the one before."""

    def __init__(self, config: Config, report: Report) -> None:
        self._config = config
        self._report = report
        self._filter = ReportFilter()
        # Consecutive rounds without an answer of Slurm.
        self._failures = 0

    def next(self) -> None:
        """Do one round, and report what is new."""
        outcome = do_round(self._config)
        self._failures = self._failures + 1 if outcome.slurm_down else 0
        for event in self._filter.new_events(outcome, time.time()):
            self._report(event)

    def pause_s(self, every_s: float) -> float:
        """Seconds until the next round; usually ``every_s``."""
        return pause_after(self._failures, every_s)


def pause_after(failures: int, every_s: float) -> float:
    """Seconds to pause, usually ``every_s``, after ``failures`` consecutive rounds without an answer of Slurm."""
    # The exponent is bounded too: Slurm may be down for a week, and 2 ** 10000 does not fit into a float.
    return every_s * float(min(2 ** min(failures, MOST_PAUSES), MOST_PAUSES))


def _rest(pause_s: float, every_s: float, lock: WatchLock, stop: StopSignal) -> None:
    """Pause for ``pause_s`` or until told to stop, touching the lock's file at least every ``every_s`` seconds."""
    until = time.monotonic() + pause_s
    while not stop.raised and (left := until - time.monotonic()) > 0:
        lock.touch()
        stop.wait(min(left, every_s))
    lock.touch()
