"""What the earlier starts of a requeued job say about interruptions.

A submission passes on what the registry knew at the time. A job that is requeued, perhaps many times, finds the rest in
its run's directory. Node 0's journal is enough: Slurm never restarts a job that ended by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.interruption.statistics import AttemptSpan, add_attempts
from slurmtrain.model.run.events.agent import AgentStarted, NodeEnded, RanksRestarted
from slurmtrain.model.run.events.base import AnyEvent, select
from slurmtrain.model.run.events.checkpoint import CheckpointSaved
from slurmtrain.model.run.layout import AttemptDir, split_attempt
from slurmtrain.model.run.requeue import PREFLIGHT
from slurmtrain.runtime.environment.launch import read_launch
from slurmtrain.runtime.environment.worker import Worker
from slurmtrain.runtime.job.run_reader import read_events

# At most this many starts are read, the latest ones.
_STARTS = 50


def read_history(worker: Worker) -> InterruptionStats:
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
    job_id, restart = split_attempt(attempt.path.name) or ("", 0)
    for number in range(max(0, restart - _STARTS), restart):
        earlier = attempt.run.attempt(job_id, number)
        history = add_attempts(history, _spans_of_start(earlier))
        saves = select(_events(earlier.rank_journal(0)), CheckpointSaved)
        if saves and saves[-1].payload.stall_s is not None:
            history = replace(history, stall_s=saves[-1].payload.stall_s, save_s=saves[-1].payload.seconds)
    return add_attempts(history, _spans_of_restarts(_events(attempt.node_journal(0))))


def _spans_of_start(attempt: AttemptDir) -> Iterable[AttemptSpan]:
    """The spans of one start; none if node 0 never journaled its beginning."""
    events = _events(attempt.node_journal(0))
    began = next(iter(select(events, AgentStarted)), None)
    if began is None:
        return
    end = next((event.payload for event in reversed(select(events, NodeEnded))), None)
    if end is not None and end.cause == PREFLIGHT:
        cause = PREFLIGHT
    else:
        cause = "preempted" if end is not None and end.signal is not None else "node_fail"
    seconds = max(0.0, _last_written(attempt) - began.time)
    yield from _spans_of_restarts(events)
    yield AttemptSpan(seconds * began.payload.nodes, cause)


def _spans_of_restarts(events: Iterable[AnyEvent]) -> Iterable[AttemptSpan]:
    """Each end of ranks that were restarted inside the allocation; their lifetime is part of the start's."""
    for event in select(events, RanksRestarted):
        yield AttemptSpan(0.0, event.payload.cause, event.payload.failures)


def _events(path: Path) -> list[AnyEvent]:
    return read_events(path, path.name)


def _last_written(attempt: AttemptDir) -> float:
    """When any file of an attempt was last written, in seconds since 1970: it was alive at least until then."""
    with contextlib.suppress(OSError), os.scandir(attempt.path) as entries:
        return max((entry.stat().st_mtime for entry in entries if entry.is_file()), default=0.0)
    return 0.0
