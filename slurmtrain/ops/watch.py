"""Repeating ``sync``: for all runs until told to stop (``watch``), or until some runs have ended (``wait``).

Only what was reported is kept between rounds, so a watch that lives for months does not grow.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slurmtrain.config import Config
from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.run.run import ENDED
from slurmtrain.ops.shared.relatives import open_upstreams
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.registry.rows import Listed
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.locks import open_lock, try_flock
from slurmtrain.system.owned_files import read_checked
from slurmtrain.system.process import Process, StopSignal, this_process

# While Slurm is down, the pause doubles with each round, up to this many times the usual one.
MOST_PAUSES = 10
# Where locks do not work, a watch that has not touched its file for this many pauses is considered gone.
_SILENT_PAUSES = 3
# A run that could not be read for this many seconds is no longer waited for: a file server that does not answer for a
# moment must not end the wait.
PATIENCE_S = 10.0
# Seconds between two checks: short at first, for runs that end soon, then longer, since checking a local run takes CPU
# time from it.
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 1.0

_END_TEXTS = {"completed": "has completed", "failed": "has failed", "cancelled": "was cancelled", "lost": "is lost"}


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that a watch did or noticed, at a time in seconds since 1970.

    ``kind``: watching, started, released, cancelled, finished, mirrored, problem, over, note or stopped.
    """

    at: float
    kind: str
    message: str
    run: str | None = None
    state: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that ``watch --json`` prints."""
        return {"schema": 1, **asdict(self), "at": iso(self.at)}


Report = Callable[[WatchEvent], None]


def watch(config: Config, every_s: float, report: Report, stop: StopSignal | None = None) -> WatchHolder | None:
    """Do rounds until told to stop, unless another process already watches.

    Args:
        config: names the runs root.
        every_s: seconds between the end of a round and the next one; more while Slurm is down. For watches on other
            machines, which may not see our lock, also how often a single round is done.
        report: called with each event.
        stop: ends the watch after the current round; None: there is a single one, for example from cron.

    Returns:
        The process that already watches, if there is one; nothing was done then.

    Raises:
        PathError: the runs root cannot be written. Only before the first round: later this is an event.
    """
    Workspace(config).prepare()
    with watch_lock(RunsRoot(config.runs).watch_lock, every_s) as lock:
        if lock.other is not None:
            return lock.other
        rounds = WatchRounds(config, report)
        if stop is None:
            rounds.next()
            return None
        report(WatchEvent(time.time(), "watching", f"watching {config.runs} every {every_s:g} s"))
        while not stop.raised:
            rounds.next()
            _rest(pause_after(rounds.failures, every_s), every_s, lock, stop)
        report(WatchEvent(time.time(), "stopped", f"stopped by {stop.raised.name}; the runs continue"))
    return None


class WatchRounds:
    """The rounds of one watch: each reports what is new since the one before.

    ``failures``: how many rounds in a row Slurm has not answered.
    """

    def __init__(self, config: Config, report: Report) -> None:
        self._config = config
        self._report = report
        self._filter = ReportFilter()
        self.failures = 0

    def next(self) -> None:
        """Do one round, and report what is new."""
        outcome = do_round(self._config)
        self.failures = self.failures + 1 if outcome.slurm_down else 0
        for event in self._filter.new_events(outcome, time.time()):
            self._report(event)


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


# --- one round, and what is new in it ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchRound:
    """What one round did, or why it failed.

    ``synced``: None if the round failed. ``failure``: why it did. ``before``: the runs' states in the registry before
    the round. ``slurm_down``: squeue did not answer.
    """

    synced: Synced | None = None
    failure: str = ""
    before: Mapping[str, str] = field(default_factory=dict)
    slurm_down: bool = False


def do_round(config: Config) -> WatchRound:
    """Do one round, with new answers from Slurm. Never raises: the result of a failed round says why.

    Slurm is asked with one squeue, and with sacct only for what squeue leaves open.
    """
    # A new workspace: its caches, such as Slurm's answers, would become outdated over months.
    warnings: list[str] = []
    notes: list[str] = []
    workspace = Workspace(config, warn=warnings.append, note=notes.append)
    before: Mapping[str, str] = {}
    try:
        if workspace.has_registry:
            before = {run_id: row.state for run_id, row in workspace.store.index().items()}
        synced = sync(workspace)
        synced.problems += warnings
        synced.notes += notes
        # A round that acted has discarded squeue's answer, and would have to ask again; but squeue did answer, or the
        # round would not have acted.
        acted = synced.started or synced.released or synced.cancelled
        down = bool(synced.observed.problems) and not acted and not workspace.scheduler.queue().answered
        return WatchRound(synced, before=before, slurm_down=down)
    except SlurmtrainError as error:
        return WatchRound(failure=str(error), before=before)
    except OSError as error:
        return WatchRound(failure=f"{error.filename or config.runs}: {describe_os_error(error)}", before=before)
    except Exception as error:  # noqa: BLE001 (whatever one round stumbles over may be gone by the next)
        return WatchRound(failure=f"an unexpected error: {type(error).__name__}: {error}", before=before)
    finally:
        workspace.close()


class ReportFilter:
    """Picks what is new in a round. Remembers the runs' states, and the problems that are not over yet."""

    def __init__(self) -> None:
        # None before the first round, which compares with the registry's states before it.
        self._states: Mapping[str, str] | None = None
        # A dict for its order: problems are reported by first appearance.
        self._problems: dict[str, None] = {}
        self._notes: set[str] = set()
        # (kind, run id) of events that may repeat each round, and were reported when they began.
        self._reported: set[tuple[str, str]] = set()

    def new_events(self, outcome: WatchRound, at: float) -> list[WatchEvent]:
        """What is new in a round that ended ``at`` this time."""
        if outcome.synced is None:
            return self._problem_events([outcome.failure], at, complete=False)
        synced, observed = outcome.synced, outcome.synced.observed
        unreadable = [f"run {run_id} is unreadable: {reason}" for run_id, reason in observed.unreadable.items()]
        counts = Counter((run_id, garbage.source) for run_id, garbage in observed.garbage)
        lines = [f"run {run_id}: {count} unreadable line(s) in {name}" for (run_id, name), count in counts.items()]
        notes = list(dict.fromkeys([*synced.notes, *lines]))
        events = self._run_events(synced, outcome.before, at)
        events += [WatchEvent(at, "note", note) for note in notes if note not in self._notes]
        self._notes = set(notes)
        # While Slurm is down, it is unknown whether other problems are over.
        problems = [*observed.problems, *unreadable, *synced.problems]
        return events + self._problem_events(problems, at, complete=not outcome.slurm_down)

    def _run_events(self, synced: Synced, before: Mapping[str, str], at: float) -> list[WatchEvent]:
        runs = synced.observed.runs
        states = {run_id: listed.state for run_id, listed in runs.items()}
        previous = before if self._states is None else self._states
        self._states = states
        ended = {run_id for run_id, state in states.items() if state in ENDED}
        finished = [run_id for run_id in states if run_id in ended and previous.get(run_id, "") not in ENDED]
        events = []

        def add(kind: str, run_id: str, text: str) -> None:
            name = f" ({runs[run_id].name})" if run_id in runs else ""
            events.append(WatchEvent(at, kind, f"run {run_id}{name} {text}", run_id, states.get(run_id)))

        for run_id in synced.started:
            number = runs[run_id].attempt if run_id in runs else 1
            add("started", run_id, f"was started again, as attempt {number}" if number > 1 else "was started")
        for run_id in synced.released:
            add("released", run_id, "was held; its job was released")
        for run_id in self._first_and_last("cancelled", synced.cancelled, finished):
            add("cancelled", run_id, "is being cancelled, as requested")
        for run_id in finished:
            reason = str(runs[run_id].row["reason"] or "")
            add("finished", run_id, _END_TEXTS.get(states[run_id], states[run_id]) + (f": {reason}" if reason else ""))
        for run_id in self._first_and_last("mirrored", synced.mirrored, finished):
            add("mirrored", run_id, "was sent to MLflow")
        self._reported = {(kind, run_id) for kind, run_id in self._reported if run_id in states.keys() - ended}
        return events

    def _first_and_last(self, kind: str, run_ids: Sequence[str], finished: Sequence[str]) -> list[str]:
        """The runs for which an event that may repeat each round happened for the first or last time."""
        chosen = [run_id for run_id in run_ids if (kind, run_id) not in self._reported or run_id in finished]
        self._reported.update((kind, run_id) for run_id in run_ids)
        return chosen

    def _problem_events(self, problems: Sequence[str], at: float, *, complete: bool) -> list[WatchEvent]:
        """Problems that are new, and, after a ``complete`` round, problems that are over."""
        new = [WatchEvent(at, "problem", text) for text in dict.fromkeys(problems) if text not in self._problems]
        over = [text for text in self._problems if text not in problems] if complete else []
        self._problems.update(dict.fromkeys(problems))
        for text in over:
            del self._problems[text]
        return [*new, *(WatchEvent(at, "over", f"problem over: {text}") for text in over)]


# --- one watch per runs root: the file that it locks ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchHolder:
    """Who watches a runs root, according to the file. ``process``: None if the file does not say.

    ``since``: ISO 8601, UTC. ``every``: seconds between two rounds.
    """

    process: Process | None = None
    since: str = ""
    every: float = 0.0

    @property
    def host(self) -> str:
        """The machine that it is on; empty if the file does not say."""
        return self.process.host if self.process is not None else ""

    def watches(self, path: Path, *, has_locks: bool) -> bool:
        """Whether it still watches, given that this process could open the file.

        Args:
            path: The file that names it.
            has_locks: Whether locks work there.
        """
        if self.host == socket.gethostname():
            # If locks work, we have the lock, so no other process on this machine does.
            if has_locks or self.process is None or self.process == this_process():
                return False
            return self.process.alive() is True
        try:
            # The holder's clock may be ahead of ours.
            return abs(time.time() - path.stat().st_mtime) < _SILENT_PAUSES * self.every
        except OSError:
            return False

    def __str__(self) -> str:
        if self.process is None:
            return "another process"
        return f"process {self.process.pid} on {self.process.host}, since {self.since}"


class WatchLock:
    """The lock of a runs root: this process holds it, or ``other`` does."""

    def __init__(self, other: WatchHolder | None, handle: int = -1) -> None:
        self.other = other
        self._handle = handle

    def record_holder(self, every_s: float | None) -> None:
        """Write that this process watches: for users, and for machines that do not see the kernel's lock.

        ``every_s``: how often it does a round; None: there is no watch any more.
        """
        holder = {**this_process().to_dict(), "since": iso(time.time()), "every": every_s}
        # In place: the lock belongs to the inode, and a new file with this name would not have it. A full disk does not
        # prevent a watch.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            if every_s is not None:
                os.pwrite(self._handle, json.dumps(holder, indent=1).encode() + b"\n", 0)

    def touch(self) -> None:
        """Show that this process is still there."""
        with contextlib.suppress(OSError):
            os.utime(self._handle)


@contextlib.contextmanager
def watch_lock(path: Path, every_s: float) -> Iterator[WatchLock]:
    """Take the lock at ``path`` for a watch with rounds ``every_s`` seconds, if no other watch has it.

    The kernel's lock decides. It may not work between machines, and some file systems have none (ENOLCK): then what the
    file says about its writer, and how long ago it was touched, decide whether that process still watches.

    Raises PathError if the file cannot be written, or is somebody else's.
    """
    with open_lock(path) as handle:
        is_ours = try_flock(handle)
        holder = read_holder(path)
        if is_ours is False:
            yield WatchLock(holder or WatchHolder())
        elif holder is not None and holder.watches(path, has_locks=is_ours is not None):
            yield WatchLock(holder)
        else:
            lock = WatchLock(None, handle)
            lock.record_holder(every_s)
            try:
                yield lock
            finally:
                lock.record_holder(None)


def read_holder(path: Path) -> WatchHolder | None:
    """The holder that the file names; None if it names none, whatever else is in it."""
    try:
        data = json.loads(read_checked(path))
        return WatchHolder(Process.from_dict(data), str(data["since"]), float(data["every"]))
    except (OSError, PathError, ValueError, KeyError, TypeError, RecursionError):
        return None


# --- waiting ----------------------------------------------------------------------------------------------------------


class Stop(Protocol):
    """What ends a wait early: a signal to this process, or a limit."""

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the wait is to end; returns whether it is."""


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    show: Callable[[Mapping[str, Listed]], None],
    stop: Stop | None = None,
) -> tuple[bool, Synced]:
    """Wait until all these runs have ended, or cannot be read for a while, then mirror them to the tracking store.

    Meanwhile it does what ``sync`` does, for them and for the runs that they start after: nobody else may.

    Args:
        workspace: where the runs are.
        run_ids: the runs to wait for; if one is of a search, all runs of the search are waited for.
        show: called with them, by id, after each check.
        stop: ends the waiting early, between two checks.

    Returns:
        Whether all runs completed, or were pruned by their search; and the last sync, with the notes of all syncs, and
        all runs of the searches, unless it was ended early.
    """
    notes: list[str] = []
    pruned: set[str] = set()
    waited = dict.fromkeys(run_ids)
    pause = FIRST_PAUSE_S
    # When a run that cannot be read now could not be read for the first time (time.monotonic()).
    unreadable: dict[str, float] = {}
    chosen: dict[str, Listed] = {}
    while True:
        # Without MLflow: importing it takes seconds, during which nothing would be shown.
        synced = sync(workspace, [*waited, *open_upstreams(workspace, chosen)], track=False)
        waited.update(dict.fromkeys(synced.searched))
        pruned.update(synced.pruned)
        chosen = {run_id: synced.observed.runs[run_id] for run_id in waited}
        notes += synced.notes
        show(chosen)
        now = time.monotonic()
        unreadable = {run_id: unreadable.get(run_id, now) for run_id, listed in chosen.items() if listed.unreadable}
        given_up = {run_id for run_id, since in unreadable.items() if now - since >= PATIENCE_S}
        if all(listed.ended or run_id in given_up for run_id, listed in chosen.items()):
            last = sync(workspace, list(waited))
            notes += last.notes
            if waited.keys() >= set(last.searched):
                break
            # Its search has answered with further runs.
            waited.update(dict.fromkeys(last.searched))
            pause = FIRST_PAUSE_S
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            return False, synced
        pause = min(pause * 1.2, LAST_PAUSE_S)
    last.notes = list(dict.fromkeys(notes))
    last.searched = [run_id for run_id in waited if run_id not in run_ids]
    return all(listed.state == "completed" or run_id in pruned for run_id, listed in chosen.items()), last
