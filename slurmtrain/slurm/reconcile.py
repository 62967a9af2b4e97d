"""What Slurm's answers add to what is known of a run: pure, so that every order of answers can be tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slurmtrain.model.run.events.command import JobObserved
from slurmtrain.model.run.job_state import ABSENT, GONE, base, is_final
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.slurm.parse import Job
from slurmtrain.slurm.scheduler import Accounting, Queue

# How long nobody may know anything of a job before it is given up: sacct lags, slurmdbd and slurmctld are restarted.
GIVEN_UP_S = 300.0


def is_open(run: Run) -> bool:
    """Whether Slurm may have something to say of any start of the run's newest job that would change anything."""
    newest = run.newest
    return newest is not None and any(not a.settled for a in run.attempts if a.job_id == newest.job_id)


def wants_accounting(run: Run, queue: Queue) -> bool:
    """Whether squeue's answer leaves something open that sacct may know."""
    newest = run.newest
    if newest is None or not newest.job_id:
        return newest is not None
    if not queue.answered:
        return False
    job = queue.job(newest.job_id)
    if job is None or base(job.state) == "FAILED":
        return True
    return any(a.job_id == newest.job_id and a.restart < (job.restart or 0) and not a.confirmed for a in run.attempts)


def news(run: Run, queue: Queue, accounting: Accounting | None, now: float) -> list[JobObserved]:
    """Observations, that these answers add. None for what is known already."""
    newest = run.newest
    if newest is None or not newest.job_id:
        return []
    known = {a.restart: a for a in run.attempts if a.job_id == newest.job_id}
    job = queue.job(newest.job_id) if queue.answered else None
    starts = accounting.starts_of(newest.job_id) if accounting is not None else []
    found = _ended_starts(newest.job_id, known, starts, job)
    if job is not None:
        found += _of_queue(known, job, newest, settled={each.restart for each in found})
    elif not any(each.restart == newest.restart for each in found) and _nobody_knows(newest, queue, accounting):
        found += _absent(newest, now)
    return found


def _ended_starts(
    job_id: str, known: Mapping[int, Attempt], starts: Sequence[Job], job: Job | None
) -> list[JobObserved]:
    """What sacct says of starts that are over. Its rows are one a start, the first one first."""
    # A job that goes on without a node that failed has a row for each of its sizes.
    starts = [start for start in starts if base(start.state) != "RESIZING"]
    live = job.restart if job is not None and not is_final(job.state) else None
    return [
        _observed(start, job_id, restart, "sacct")
        for restart, start in enumerate(starts)
        if is_final(start.state) and restart != live and _matters(start.state, known.get(restart))
    ]


def _matters(state: str, attempt: Attempt | None) -> bool:
    """Whether a final state of a start adds anything to what is known of it."""
    if attempt is None or not attempt.confirmed:
        return True
    # One that is to start again tells by its next start that it was put back into the queue.
    return not attempt.settled and base(state) != "REQUEUED"


def _of_queue(known: Mapping[int, Attempt], job: Job, newest: Attempt, settled: set[int]) -> list[JobObserved]:
    restart = newest.restart if job.restart is None else job.restart
    attempt = known.get(restart)
    if is_final(job.state):
        if restart in settled or not _matters(job.state, attempt):
            return []
        return [_observed(job, newest.job_id, restart, "squeue")]
    reappeared = attempt is not None and attempt.absent_since is not None and not attempt.settled
    if attempt is None or reappeared or not attempt.handed_over:
        return [_observed(job, newest.job_id, restart, "squeue")]
    return []


def _nobody_knows(newest: Attempt, queue: Queue, accounting: Accounting | None) -> bool:
    """Whether both sources were asked since the job was submitted, answered, and have nothing final to say."""
    if newest.settled or accounting is None:
        return False
    if not (newest.handed_over and queue.answered and accounting.answered):
        return False
    return min(queue.at, accounting.at) > (newest.submitted_at or 0.0)


def _absent(newest: Attempt, now: float) -> list[JobObserved]:
    absent = JobObserved(job_id=newest.job_id, restart=newest.restart, source="squeue, sacct", state=ABSENT)
    if newest.absent_since is None:
        return [absent]
    if now - newest.absent_since < GIVEN_UP_S:
        return []
    reason = "Slurm knows nothing of its job any more, and it did not say its end"
    return [replace(absent, state=GONE, reason=reason)]


def _observed(job: Job, job_id: str, restart: int, source: str) -> JobObserved:
    waits = not is_final(job.state)
    return JobObserved(
        job_id=job_id,
        restart=restart,
        source=source,
        state=job.state,
        nodes=job.nodes,
        started_at=None if waits else job.starts_at,
        ended_at=None if waits else job.ends_at,
        time_limit_s=job.time_limit_s,
        exit_code=job.exit_code,
        signal=job.signal,
    )
