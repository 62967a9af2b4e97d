"""A run's history, from the files in its directory: for agents and ranks, which have no registry."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurmtrain.errors import LaunchError, RunUnreadable, UntrustedPath
from slurmtrain.model.interruption.interval import AttemptSpan, InterruptionStats, add_attempts
from slurmtrain.model.metrics.curves import start_of
from slurmtrain.model.metrics.settled import Attempted, LoggedLine
from slurmtrain.model.run.events.agent_events import AgentStarted, NodeEnded, RanksRestarted
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.checkpoint_events import CheckpointSaved
from slurmtrain.model.run.journal_lines import Point, Progress, events_of, points_of, read_lines, read_point
from slurmtrain.model.run.layout import METRICS, AttemptDir, RunDir, split_attempt
from slurmtrain.model.run.run import Run
from slurmtrain.runtime.environment.node import Worker, read_launch
from slurmtrain.system.journal_files import JournalFile, journal_files, last_points, read_pieces
from slurmtrain.system.owned_files import Check, check_owned, open_regular
from slurmtrain.system.process import Process

# Among ranks, only rank 0 journals what the state of a run depends on, and there may be thousands of others.
_OTHER_RANK = re.compile(r"attempts/[^/]+/rank-(?!0\.).*\.jsonl")
_TAIL_BYTES = 65_536
# All agents of a run are started together. One that is killed before it journals anything is never seen.
_BEGIN_S = 300.0
_POLL_S = 0.05
T = TypeVar("T")


def read_run(run: RunDir) -> Run:
    """The run as its journals have it now, before the policy is asked. What cannot be read is skipped."""
    # Late, here and below: most agents end without having read a run.
    from slurmtrain.model.run.fold import RunBuilder

    builder, progress = RunBuilder(run.id), {}
    with contextlib.suppress(RunUnreadable):
        for file in journal_files(run, []):
            # No decision depends on what is guessed.
            if file.is_guessed:
                continue
            if file.metrics_of is not None:
                progress[file.metrics_of] = _read_progress(Path(file.path))
            elif not _OTHER_RANK.fullmatch(file.name):
                with contextlib.suppress(RunUnreadable):
                    builder.add(_events(file))
    return builder.build(progress)


def read_run_of(run: RunDir, check: Check, most_bytes: int) -> Run:
    """A run of another account as its journals have it now.

    Args:
        run: Its directory.
        check: Who may own its files or write to them.
        most_bytes: What its journals may take; a run of one's own has no such limit.

    Raises:
        RunUnreadable: They take more, or are empty, or any of them cannot be read.
    """
    from slurmtrain.model.run.fold import RunBuilder

    files = [file for file in journal_files(run, check=check) if not _OTHER_RANK.fullmatch(file.name)]
    if sum(file.size for file in files if file.metrics_of is None) > most_bytes:
        raise RunUnreadable(f"its journals take more than {most_bytes} bytes")
    builder, progress = RunBuilder(run.id), {}
    for file in files:
        if file.is_guessed:
            continue
        if file.metrics_of is not None:
            progress[file.metrics_of] = _read_progress(Path(file.path), check)
        else:
            builder.add(_events(file, check))
    if not builder.events:
        raise RunUnreadable("there is no event in its journals")
    return builder.build(progress)


def read_events(path: Path, source: str | None = None) -> list[AnyEvent]:
    """The events of the journal at ``path``; empty if there is no such file yet.

    ``source``: their origin in messages; by default the file's name.
    """
    with contextlib.suppress(OSError, RunUnreadable):
        return _events(JournalFile(source or path.name, str(path), path.stat().st_size))
    return []


def wait_for_node_0(
    attempt: AttemptDir, read: Callable[[], T | None], give_up: Callable[[], bool], before: str
) -> T | None:
    """Wait until node 0's agent has written something for the other nodes.

    Args:
        attempt: The attempt.
        read: Reads it; None: it is not there yet.
        give_up: Whether to wait no longer.
        before: What that agent has not done if it ends before.

    Returns:
        What was read; None if it was given up.

    Raises:
        LaunchError: The agent has ended, or never begun.
    """
    deadline, journal = time.monotonic() + _BEGIN_S, attempt.node_journal(0)
    node_0: Process | None = None
    while not give_up():
        for event in select(read_events(journal), AgentStarted) if node_0 is None else ():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                node_0 = Process.from_dict(event.payload.process or {})
        # Looked at before its file, so that its last word counts.
        is_gone = time.monotonic() > deadline if node_0 is None else node_0.alive() is False
        written = read()
        if written is not None:
            return written
        if is_gone:
            raise LaunchError(f"the agent of node 0 ended before {before}")
        time.sleep(_POLL_S)
    return None


def last_step(attempt: AttemptDir) -> int | None:
    """The last step in an attempt's metrics; None if there are none."""
    return _read_progress(attempt.metrics).last_step


def _events(file: JournalFile, check: Check = check_owned) -> list[AnyEvent]:
    return [event for piece in read_pieces(file, check=check) for event in events_of(piece.reading, file.name)[0]]


def _read_progress(metrics: Path, check: Check = check_owned) -> Progress:
    """Progress according to the end of a metrics file, which may be long."""
    return Progress().advance(last_points(metrics, _TAIL_BYTES, check=check))


# --- what the earlier starts of a requeued job say about interruptions ------------------------------------------------
# A submission passes on what the registry knew at the time. A job that is requeued, perhaps many times, finds the rest
# in its run's directory. Node 0's journal is enough: Slurm never restarts a job that ended by itself.


# At most this many starts are read, the latest ones.
_STARTS = 50


def read_interruptions(worker: Worker) -> InterruptionStats:
    """What was known about interruptions when the job was submitted, and what its earlier starts have seen.

    Args:
        worker: A rank of the job.

    Raises:
        PathError: The submission's file cannot be read.
    """
    launch = read_launch(worker.submission) if worker.submission is not None else None
    history = (launch.history if launch is not None else None) or InterruptionStats()
    return with_restarts(history, worker.attempt) if worker.attempt is not None else history


def with_restarts(history: InterruptionStats, attempt: AttemptDir) -> InterruptionStats:
    """The submission's ``history``, with what the earlier starts of the job of this ``attempt`` have seen since."""
    from slurmtrain.model.run.outcome import PREFLIGHT

    job_id, restart = split_attempt(attempt.path.name) or ("", 0)
    for number in range(max(0, restart - _STARTS), restart):
        earlier = attempt.run.attempt(job_id, number)
        events = read_events(earlier.node_journal(0))
        # None if node 0 was killed before it journaled anything.
        began = next(iter(select(events, AgentStarted)), None)
        if began is not None:
            end = next((event.payload for event in reversed(select(events, NodeEnded))), None)
            cause = "node_fail" if end is None or end.signal is None else "preempted"
            if end is not None and end.cause == PREFLIGHT:
                cause = PREFLIGHT
            written = 0.0
            with contextlib.suppress(OSError), os.scandir(earlier.path) as entries:
                # It was alive at least until then.
                written = max((entry.stat().st_mtime for entry in entries if entry.is_file()), default=0.0)
            span = AttemptSpan(max(0.0, written - began.time) * began.payload.nodes, cause)
            history = add_attempts(history, [*_spans_of_restarts(events), span])
        saves = select(read_events(earlier.rank_journal(0)), CheckpointSaved)
        if saves and saves[-1].payload.stall_s is not None:
            history = replace(history, stall_s=saves[-1].payload.stall_s, save_s=saves[-1].payload.seconds)
    return add_attempts(history, _spans_of_restarts(read_events(attempt.node_journal(0))))


def _spans_of_restarts(events: Iterable[AnyEvent]) -> Iterable[AttemptSpan]:
    """Each end of ranks that were restarted inside the allocation; their lifetime is part of the start's."""
    for event in select(events, RanksRestarted):
        yield AttemptSpan(0.0, event.payload.cause, event.payload.failures)


# --- the lines that a run has logged, read as often as they are needed: there may be millions -------------------------
# Enough to read fast, and little memory for any number of lines.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoggedLines:
    """A run's attempts with their metrics files, as long as these are at one moment."""

    attempts: Sequence[Attempted]
    names: Mapping[int, str]
    """The metrics file of each attempt, relative to the run directory."""


def logged_lines(run: Run, directory: RunDir) -> LoggedLines:
    """The lines of a run; nothing is read yet. Raises RunUnreadable."""
    # Trackers that could not take a point back are given none that is guessed.
    files = {
        file.metrics_of: file
        for file in journal_files(directory)
        if file.metrics_of is not None and not file.is_guessed
    }
    attempts = [Attempted(start_of(attempt), partial(_lines_from, files.get(attempt.key))) for attempt in run.attempts]
    names = {attempt.number: files[attempt.key].name for attempt in run.attempts if attempt.key in files}
    return LoggedLines(attempts, names)


def _lines_from(file: JournalFile | None, offset: int) -> Iterator[LoggedLine]:
    if file is None or file.size <= offset:
        return
    for piece in read_pieces(file, offset, length=_PIECE_BYTES):
        points = ((at, point) for at, record in piece.reading.records if (point := read_point(record)) is not None)
        previous = None
        for at, point in points:
            if previous is not None:
                yield LoggedLine(previous[0], at, previous[1])
            previous = (at, point)
        if previous is not None:
            yield LoggedLine(previous[0], piece.reading.end, previous[1])


# So much of a file is read at a time: many lines.
_WINDOW_BYTES = 1 << 16


def logged_step(run: RunDir, at: float, name: str = METRICS) -> int | None:
    """The last step that any attempt of a run had logged by a time; None if none had.

    Args:
        run: The run.
        at: In seconds since 1970.
        name: The file of each attempt that has the steps.
    """
    points: list[Point] = []
    for path in run.attempts.glob(f"*/{name}"):
        with contextlib.suppress(OSError, UntrustedPath):
            handle = open_regular(path)
            try:
                point = _search(handle, at, path.name)
            finally:
                os.close(handle)
            points += [] if point is None else [point]
    return max(points, key=lambda point: point.time).step if points else None


def _search(handle: int, at: float, name: str) -> Point | None:
    """Halve the part of the file that the point is in until one window holds it: lines are in the order of time."""
    begin, end = 0, os.fstat(handle).st_size
    while end - begin > _WINDOW_BYTES:
        middle = (begin + end) // 2
        points = _points_in(handle, middle, _WINDOW_BYTES, name)
        if points and points[0].time <= at:
            begin = middle
        else:
            end = middle
    # The line that ends the last window begins before it does.
    points = _points_in(handle, begin, end - begin + _WINDOW_BYTES, name)
    return next((point for point in reversed(points) if point.time <= at), None)


def _points_in(handle: int, offset: int, length: int, name: str) -> list[Point]:
    return points_of(record for _, record in read_lines(os.pread(handle, length, offset), offset, name).records)
