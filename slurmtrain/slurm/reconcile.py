"""What Slurm's answers add to what is known about a run. Pure, so that tests can try every order of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmtrain.model.run.run import ABSENT, GONE, Attempt, Run, base, is_final
from slurmtrain.slurm.parse import Job
from slurmtrain.slurm.scheduler import Accounting, Queue

if TYPE_CHECKING:
    from slurmtrain.model.run.events.command_events import JobObserved

# How long a job may be missing from both squeue and sacct before it is given up: sacct lags behind, and slurmdbd and
# slurmctld may be restarting.
GIVEN_UP_S = 300.0


def may_change(run: Run) -> bool:
    """Whether an answer from Slurm about any start of the run's newest job could still change anything."""
    newest = run.newest
    return newest is not None and any(
        not attempt.settled for attempt in run.attempts if attempt.job_id == newest.job_id
    )


def needs_accounting(run: Run, queue: Queue) -> bool:
    """Whether squeue's answer leaves a question open that sacct may answer."""
    newest = run.newest
    if newest is None or not newest.job_id:
        return newest is not None
    if not queue.answered:
        return False
    job = queue.job(newest.job_id)
    # squeue reports FAILED also if sacct knows more, for example that a step ran out of memory.
    if job is None or base(job.state) == "FAILED":
        return True
    earlier = [a for a in run.attempts if a.job_id == newest.job_id and a.restart < (job.restart or 0)]
    return any(not attempt.confirmed for attempt in earlier)


def new_observations(run: Run, queue: Queue, accounting: Accounting | None, now: float) -> list[JobObserved]:
    """What these answers add, as events; none for facts that are known already.

    Args:
        run: the run as known so far; only its newest job is considered.
        queue: squeue's answer.
        accounting: sacct's answer; None if it was not queried.
        now: seconds since 1970, to determine how long the job has been unknown to Slurm.
    """
    newest = run.newest
    if newest is None or not newest.job_id:
        return []
    attempts = {attempt.restart: attempt for attempt in run.attempts if attempt.job_id == newest.job_id}
    starts = accounting.starts_of(newest.job_id) if accounting is not None else []
    job = _queued(newest, queue, accounting, starts) if queue.answered else None
    observations = _observe_ended(newest.job_id, attempts, starts, job)
    reported = {observation.restart for observation in observations}
    if job is not None:
        observations += _observe_queued(attempts, job, newest, reported)
    elif newest.restart not in reported and _is_unknown(newest, queue, accounting):
        assert accounting is not None
        observations += _observe_absence(newest, now, is_cancelled=_may_be_cancelled(newest, accounting, starts))
    return observations


def _queued(newest: Attempt, queue: Queue, accounting: Accounting | None, starts: Sequence[Job]) -> Job | None:
    """Squeue's answer about the attempt's job: its own row, or the row of the elements that ended before they began."""
    job = queue.job(newest.job_id)
    if job is not None or accounting is None or not accounting.answered or not _never_began(newest, starts):
        return job
    return queue.array_of(newest.job_id)


def _may_be_cancelled(newest: Attempt, accounting: Accounting, starts: Sequence[Job]) -> bool:
    """Whether a job that squeue does not know is an element of an array that was cancelled before it began.

    Of such an element nothing is left, if other elements have not begun either: Slurm takes it out of their common row,
    in accounting some time later (seen on 22.05 and 24.11).
    """
    return _never_began(newest, starts) and accounting.knows_array_of(newest.job_id)


def _never_began(newest: Attempt, starts: Sequence[Job]) -> bool:
    """Whether neither an agent of the job nor accounting knows that it has begun: a row for several has not."""
    return not newest.hosts and not newest.restart and all(start.elements for start in starts)


def _observe_ended(
    job_id: str, attempts: Mapping[int, Attempt], starts: Sequence[Job], job: Job | None
) -> list[JobObserved]:
    """What sacct says about finished starts: it has a row for each start, the first one first."""
    # A job that has lost a node and continues without it has a row for each of its sizes (sacct(1), RESIZING).
    starts = [start for start in starts if base(start.state) != "RESIZING"]
    live = job.restart if job is not None and not is_final(job.state) else None
    return [
        _observed(start, job_id, restart, "sacct")
        for restart, start in enumerate(starts)
        if is_final(start.state) and restart != live and _adds_anything(start.state, attempts.get(restart))
    ]


def _adds_anything(state: str, attempt: Attempt | None) -> bool:
    """Whether a final state of a start adds anything to what is known about it."""
    if attempt is None or not attempt.confirmed:
        return True
    # The requeue itself follows from the job's next start, which Slurm reports too.
    return not attempt.settled and base(state) != "REQUEUED"


def _observe_queued(
    attempts: Mapping[int, Attempt], job: Job, newest: Attempt, reported: set[int]
) -> list[JobObserved]:
    """What squeue says about the job's newest start, unless sacct has ``reported`` its end."""
    restart = newest.restart if job.restart is None else job.restart
    attempt = attempts.get(restart)
    if is_final(job.state):
        if restart in reported or not _adds_anything(job.state, attempt):
            return []
        return [_observed(job, newest.job_id, restart, "squeue")]
    # While a job is pending or running, only its existence is journaled, once: the rest is queried anew each time.
    reappeared = attempt is not None and attempt.absent_since is not None and not attempt.settled
    if attempt is None or reappeared or not attempt.handed_over:
        return [_observed(job, newest.job_id, restart, "squeue")]
    return []


def _is_unknown(newest: Attempt, queue: Queue, accounting: Accounting | None) -> bool:
    """Whether squeue and sacct have both answered since the job was submitted, and neither knows it or its end."""
    if newest.settled or accounting is None:
        return False
    if not (newest.handed_over and queue.answered and accounting.answered):
        return False
    return min(queue.at, accounting.at) > (newest.submitted_at or 0.0)


def _observe_absence(newest: Attempt, now: float, *, is_cancelled: bool) -> list[JobObserved]:
    # Imported here: creating the event classes takes longer than a query that finds nothing new.
    from slurmtrain.model.run.events.command_events import JobObserved

    absent = JobObserved(job_id=newest.job_id, restart=newest.restart, source="squeue, sacct", state=ABSENT)
    if newest.absent_since is None:
        return [absent]
    if now - newest.absent_since < GIVEN_UP_S:
        return []
    if is_cancelled:
        return [replace(absent, state="CANCELLED")]
    reason = "Slurm knows nothing of its job any more, and it did not say its end"
    return [replace(absent, state=GONE, reason=reason)]


def _observed(job: Job, job_id: str, restart: int, source: str) -> JobObserved:
    from slurmtrain.model.run.events.command_events import JobObserved

    ended = is_final(job.state)
    return JobObserved(
        job_id=job_id,
        restart=restart,
        source=source,
        state=job.state,
        nodes=job.nodes,
        started_at=job.starts_at if ended else None,
        ended_at=job.ends_at if ended else None,
        time_limit_s=job.time_limit_s,
        exit_code=job.exit_code,
        signal=job.signal,
    )
