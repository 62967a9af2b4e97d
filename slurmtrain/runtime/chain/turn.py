"""Whether it is a run's turn: whether the runs that it starts after have ended, according to their own journals.

Slurm starts a job with ``--dependency=afterany`` once the other job is over, however it ended, and also if it will be
replaced by another job; ``afterok`` would never start it after a crash that the run itself survives, and would start it
once Slurm has forgotten a job that failed. So node 0 decides, and puts its job back into the queue if it is too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slurmtrain.model.interruption.next_start import with_next_start
from slurmtrain.model.run.chain.upstreams import EARLY, Standing, Upstream, standing
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.runtime.job.run_reader import read_run

# How long a job of Slurm's waits for the last words of an upstream, which a network file system may show late.
_LAST_WORDS_S = 10.0
_POLL_S = 0.5
_SLOWEST_POLL_S = 3.0
# When a job looks again whether an upstream that has no job has ended; then after twice as long each time: a week costs
# 35 starts, and nobody who waits for a command for days waits much longer for that.
_LOOK_AGAIN_S = 120.0
_SELDOM_S = 6 * 3600.0
_MOST_DOUBLINGS = 8


def read_upstream_runs(run: RunDir, upstreams: Sequence[Upstream]) -> dict[str, Run]:
    """The upstreams of a run that exist, by id, as their journals have them now."""
    root = RunsRoot(run.path.parent)
    directories = [root.run(upstream.run) for upstream in upstreams]
    return {each.id: with_next_start(read_run(each)) for each in directories if each.path.is_dir()}


def standing_of(run: RunDir, upstreams: Sequence[Upstream]) -> Standing:
    """How the upstreams of a run stand."""
    return standing(upstreams, read_upstream_runs(run, upstreams))


def wait_for_turn(
    run: RunDir,
    upstreams: Sequence[Upstream],
    *,
    patient: bool,
    note: Callable[[Upstream], None],
    give_up: Callable[[], bool],
) -> Standing:
    """Wait until the upstreams of a run have ended; returns how they stand then.

    Args:
        run: The run.
        upstreams: The runs that it starts after.
        patient: Wait as long as it takes, as on this machine, where that costs nothing.
        note: Called with each upstream as it begins to wait for it.
        give_up: Whether not to wait any longer.
    """
    began, noted, poll_s = time.monotonic(), None, _POLL_S
    remaining = upstreams
    while True:
        now = standing_of(run, remaining)
        if now.is_ready and remaining is not upstreams:
            # Again: one that had ended may have been resumed.
            now = standing_of(run, upstreams)
        if now.is_ready or now.problem or give_up():
            return now
        if not patient and time.monotonic() - began > _LAST_WORDS_S:
            return now
        if patient and now.waits[0] != noted:
            noted = now.waits[0]
            note(noted)
        # Of a sweep, most have ended long before the last.
        remaining = now.waits
        time.sleep(poll_s)
        poll_s = min(_SLOWEST_POLL_S, 1.2 * poll_s)


def unfinished_jobs(run: RunDir, upstreams: Sequence[Upstream]) -> list[str]:
    """The newest jobs of the upstreams of a run that have not ended."""
    runs = read_upstream_runs(run, upstreams).values()
    return [each.newest.job_id for each in runs if not each.ended and each.newest is not None and each.newest.job_id]


def look_again_s(run: RunDir, upstreams: Sequence[Upstream]) -> float:
    """In how many seconds a job that has started too early looks again, if no job of its upstreams is in the queue.

    Args:
        run: Its run, whose end has been journaled.
        upstreams: The runs that it starts after.
    """
    waits = [each.newest for each in read_upstream_runs(run, upstreams).values() if not each.ended]
    submitted = max((attempt.submitted_at or 0.0 for attempt in waits if attempt is not None), default=0.0)
    starts = [attempt for attempt in read_run(run).attempts if attempt.cause == EARLY]
    # The starts before that waited for another job.
    count = sum((attempt.started_at or 0.0) > submitted for attempt in starts)
    return min(_SELDOM_S, _LOOK_AGAIN_S * 2.0 ** min(_MOST_DOUBLINGS, max(0, count - 1)))
