"""Reconciling again and again: what ``sync`` does once, for those who do not want to think of it.

A round keeps nothing but what was told already, so that a process which goes on for months stays as it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.config import Config
from slurmtrain.errors import PlaceError, SlurmtrainError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.run.run import ENDED
from slurmtrain.ops.shared.interrupt import Stop
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.views import iso
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.system.files import FILE_MODE, locked, reason_of
from slurmtrain.system.process import Process, myself

# While Slurm is down the pause doubles with each round, up to so many times the usual one.
MOST_PAUSES = 10
# One that has not touched its file for so many pauses is taken to be gone, where no lock of the kernel's can tell.
_SILENT_PAUSES = 3


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that a watch did or found, at a time in seconds since 1970.

    ``kind``: watching, started, released, cancelled, finished, mirrored, problem, over, note or stopped.
    """

    at: float
    kind: str
    message: str
    run: str | None = None
    state: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "schema": 1,
            "at": iso(self.at),
            "kind": self.kind,
            "run": self.run,
            "state": self.state,
            "message": self.message,
        }


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchRound:
    """One round: what it did, or why it came to nothing; the runs' states before it, and whether squeue answered."""

    synced: Synced | None = None
    failure: str = ""
    before: Mapping[str, str] = field(default_factory=dict)
    slurm_down: bool = False


def look(config: Config) -> WatchRound:
    """One round, with answers of Slurm's that are new. Never raises: a round that failed says why.

    Slurm is asked by one squeue, and by sacct only for what squeue leaves open.
    """
    workspace = Workspace(config)
    before: Mapping[str, str] = {}
    try:
        if config.registry.exists():
            before = {run_id: listed.state for run_id, listed in workspace.store.listed().items()}
        synced = sync(workspace)
        return WatchRound(synced, before=before, slurm_down=_is_down(workspace, synced))
    except SlurmtrainError as error:
        return WatchRound(failure=str(error), before=before)
    except OSError as error:
        return WatchRound(failure=f"{error.filename or config.runs}: {reason_of(error)}", before=before)
    except Exception as error:  # noqa: BLE001 (whatever one round stumbles over, the next may find gone)
        return WatchRound(
            failure=f"an error that slurmtrain does not know: {type(error).__name__}: {error}", before=before
        )
    finally:
        if "store" in vars(workspace):
            workspace.store.close()


def _is_down(workspace: Workspace, synced: Synced) -> bool:
    """Whether squeue did not answer. Where a job was handed over or ended it did, and would have to be asked anew."""
    acted = synced.started or synced.released or synced.cancelled
    return bool(synced.observed.problems) and not acted and not workspace.scheduler.queue().answered


class ReportFilter:
    """What was told already: runs by state, and problems that are not over yet."""

    def __init__(self) -> None:
        self._states: Mapping[str, str] | None = None
        self._problems: dict[str, None] = {}
        self._notes: set[str] = set()
        self._routine: set[tuple[str, str]] = set()
        self._failures = 0

    def news(self, found: WatchRound, at: float) -> list[WatchEvent]:
        """What of a round has not been told yet."""
        self._failures = self._failures + 1 if found.slurm_down else 0
        if found.synced is None:
            return self._of_problems([found.failure], at, whole=False)
        synced = found.synced
        problems = [*synced.observed.problems, *synced.problems]
        news = [*self._of_runs(synced, found.before, at), *self._of_notes(synced, at)]
        # While Slurm is down nobody knows what else would go wrong.
        return news + self._of_problems(problems, at, whole=not found.slurm_down)

    def pause(self, every: float) -> float:
        """Seconds until the next round."""
        return pause_after(self._failures, every)

    def _of_runs(self, synced: Synced, before: Mapping[str, str], at: float) -> list[WatchEvent]:
        runs = synced.observed.runs
        states = {run_id: listed.state for run_id, listed in runs.items()}
        known = before if self._states is None else self._states
        self._states = states
        over = {run_id for run_id, state in states.items() if state in ENDED}
        finished = [run_id for run_id in states if run_id in over and known.get(run_id, "") not in ENDED]

        def tell(kind: str, run_id: str, what: str) -> WatchEvent:
            name = f" ({runs[run_id].name})" if run_id in runs else ""
            return WatchEvent(at, kind, f"run {run_id}{name} {what}", run_id, states.get(run_id))

        def first(kind: str, run_id: str) -> bool:
            """Whether something that may happen in every round has not been told since the run began, or has ended."""
            new = (kind, run_id) not in self._routine
            self._routine.add((kind, run_id))
            return new or run_id in finished

        news = [tell("started", run_id, _start_words(synced, run_id)) for run_id in synced.started]
        news += [tell("released", run_id, "was held; its job was released") for run_id in synced.released]
        news += [tell("cancelled", run_id, "is being ended, as was wished") for run_id in synced.cancelled
                 if first("cancelled", run_id)]  # fmt: skip
        news += [tell("finished", run_id, _end_words(synced, run_id)) for run_id in finished]
        news += [tell("mirrored", run_id, "was sent to MLflow") for run_id in synced.mirrored
                 if first("mirrored", run_id)]  # fmt: skip
        self._routine = {(kind, run_id) for kind, run_id in self._routine if run_id in states.keys() - over}
        return news

    def _of_notes(self, synced: Synced, at: float) -> list[WatchEvent]:
        notes = list(dict.fromkeys([*synced.notes, *_unreadable(synced.observed)]))
        new = [WatchEvent(at, "note", note) for note in notes if note not in self._notes]
        self._notes = set(notes)
        return new

    def _of_problems(self, problems: list[str], at: float, *, whole: bool) -> list[WatchEvent]:
        """Problems that are new, and, after a round that was ``whole``, those that are over."""
        new = [WatchEvent(at, "problem", text) for text in dict.fromkeys(problems) if text not in self._problems]
        gone = [text for text in self._problems if text not in problems] if whole else []
        self._problems.update(dict.fromkeys(problems))
        for text in gone:
            del self._problems[text]
        return [*new, *(WatchEvent(at, "over", f"no longer so: {text}") for text in gone)]


def pause_after(failures: int, every: float) -> float:
    """Seconds to rest after so many rounds in a row in which Slurm did not answer."""
    return every * float(min(2 ** min(failures, MOST_PAUSES), MOST_PAUSES))


def _start_words(synced: Synced, run_id: str) -> str:
    listed = synced.observed.runs.get(run_id)
    return f"was started again, as attempt {listed.attempt}" if listed and listed.attempt > 1 else "was started"


def _end_words(synced: Synced, run_id: str) -> str:
    listed = synced.observed.runs[run_id]
    words = {"completed": "has completed", "failed": "has failed", "cancelled": "was cancelled", "lost": "is lost"}
    reason = str(listed.row["reason"] or "")
    return words.get(listed.state, listed.state) + (f": {reason}" if reason else "")


def _unreadable(observed: Observed) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for run_id, bad in observed.garbage:
        counts[run_id, bad.source] = counts.get((run_id, bad.source), 0) + 1
    return [f"run {run_id}: {count} unreadable line(s) in {source}" for (run_id, source), count in counts.items()]


# --- one watch for a runs root ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """Who watches a runs root, as its file says; no process where the file does not say. ``since``: ISO 8601, UTC."""

    process: Process | None = None
    since: str = ""
    every: float = 0.0

    @property
    def host(self) -> str:
        """The machine it is on."""
        return self.process.host if self.process is not None else ""

    def __str__(self) -> str:
        if self.process is None:
            return "another process"
        return f"process {self.process.pid} on {self.process.host}, since {self.since}"


class Post:
    """The place of the one process that watches a runs root, or who has it: ``other``."""

    def __init__(self, other: Holder | None, handle: int = -1) -> None:
        self.other = other
        self._handle = handle

    def take(self, every: float) -> None:
        """Write who watches, for people, and for those to whom the kernel's lock says nothing."""
        said = {**myself().to_dict(), "since": iso(time.time()), "every": every}
        self._write(json.dumps(said, indent=1).encode() + b"\n")

    def beat(self) -> None:
        """Show that this process is still there."""
        with contextlib.suppress(OSError):
            os.utime(self._handle)

    def leave(self) -> None:
        """Nobody watches any more."""
        self._write(b"")

    def _write(self, content: bytes) -> None:
        # In place: a new file of this name would be without the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, content, 0)


@contextlib.contextmanager
def post(path: Path, every: float) -> Iterator[Post]:
    """Take the place of the one that watches, if it is free.

    The kernel's lock decides. It may say nothing of another machine, or not be had at all on some filesystems: what the
    file says of its writer, and how long ago it was touched, then tell whether that one lives.
    """
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(locked(path, wait=False))
            locks = True
        except (OSError, PlaceError):
            handle = stack.enter_context(_opened(path))
            locks = False
        said = read_holder(path)
        if handle is None:
            yield Post(said or Holder())
        elif said is not None and _lives(said, path, locks=locks):
            yield Post(said)
        else:
            mine = Post(None, handle)
            mine.take(every)
            try:
                yield mine
            finally:
                mine.leave()


def read_holder(path: Path) -> Holder | None:
    """Who the file says watches; None where it does not say so, whatever else is in it."""
    try:
        said = json.loads(path.read_bytes())
        return Holder(Process.from_dict(said), str(said["since"]), float(said["every"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _lives(said: Holder, path: Path, *, locks: bool) -> bool:
    if said.host == socket.gethostname():
        return not locks and said.process is not None and said.process != myself() and said.process.alive() is True
    try:
        silent_s = abs(time.time() - path.stat().st_mtime)
    except OSError:
        return False
    return silent_s < _SILENT_PAUSES * said.every


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise PlaceError(f"cannot write {path}: {reason_of(error)}") from error
    try:
        yield handle
    finally:
        os.close(handle)


# --- until it is ended ------------------------------------------------------------------------------------------------


def watch(config: Config, every: float, tell: Callable[[WatchEvent], None], stop: Stop) -> Holder | None:
    """Do rounds, ``every`` so many seconds, until asked to stop; returns who else watches already, if anybody does.

    Raises PlaceError, before the first round alone, where the runs root cannot be written.
    """
    gc.enable()
    Workspace(config).prepare()
    with post(RunsRoot(config.runs).watch_lock, every) as place:
        if place.other is not None:
            return place.other
        tell(WatchEvent(time.time(), "watching", f"watching {config.runs} every {every:g} s"))
        memory = ReportFilter()
        while not stop.raised:
            _round(config, memory, tell)
            _rest(memory.pause(every), every, place, stop)
        tell(WatchEvent(time.time(), "stopped", f"stopped by {stop.raised.name}; runs go on"))
    return None


def watch_once(config: Config, every: float, tell: Callable[[WatchEvent], None]) -> Holder | None:
    """A single round, unless somebody watches: then who does is returned, and nothing done. Raises PlaceError."""
    Workspace(config).prepare()
    with post(RunsRoot(config.runs).watch_lock, every) as place:
        if place.other is None:
            _round(config, ReportFilter(), tell)
        return place.other


def _round(config: Config, memory: ReportFilter, tell: Callable[[WatchEvent], None]) -> None:
    for news in memory.news(look(config), time.time()):
        tell(news)


def _rest(pause: float, every: float, place: Post, stop: Stop) -> None:
    """Rest, and beat all the while."""
    until = time.monotonic() + pause
    while not stop.raised and (left := until - time.monotonic()) > 0:
        place.beat()
        stop.wait(min(left, every))
    place.beat()
