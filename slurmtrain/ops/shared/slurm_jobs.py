"""Runs whose jobs are in Slurm: the queries, and which of the answers are journaled.

If a submission was killed, its job is searched for by name (the run's, with its id at the end; of an element of a job
array, with the array's) among the jobs of squeue and sacct that no submission has claimed. The process that calls
sbatch (``slurm/sbatch_process``) inherits the run's lock, so no search starts while it lives. If it was killed too, an
sbatch that it may have left is searched for by its command line. Only then is Slurm asked: an older, cached answer can
prove that there is a job, but never that there is none.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.job_state import (
    CAUSE_OF_STATE,
    HELD,
    HELD_BY_ADMIN,
    HELD_BY_SLURM,
    HELD_BY_USER,
    SUSPENDED,
    bare_reason,
    base,
    describe_reason,
    is_final,
)
from slurmtrain.model.run.layout import ArrayDir, RunDir, RunsRoot, SubmissionDir
from slurmtrain.model.run.run import Attempt, Live, Run
from slurmtrain.ops.shared.local_jobs import checkpoints_on_disk, last_error_line, last_written_at
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.slurm.parse import (
    Job,
    find_unclaimed_job,
    is_named_after,
    job_arrays,
    read_job,
    read_time,
    second_jobs,
)
from slurmtrain.slurm.scheduler import GIVEN_UP_S, Accounting, Queue, may_change, needs_accounting, new_observations
from slurmtrain.slurm.slurm_commands import run_command
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.model.run.events.command_events import JobObserved


@dataclass(slots=True)
class SlurmLook:
    """The result of asking Slurm: which runs have new journal entries, what is live, and what had no answer."""

    changed: list[RunDir] = field(default_factory=list)
    live: dict[str, Live] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Answers:
    """What Slurm has answered. ``asked_at``: the earliest time it was asked, in seconds since 1970."""

    queue: Queue
    accounting: Accounting | None
    asked_at: float

    @cached_property
    def jobs(self) -> Mapping[str, Job]:
        """The newest start of each job of squeue and sacct, by id."""
        starts = self.accounting.starts if self.accounting is not None else {}
        return {**{job_id: rows[-1] for job_id, rows in starts.items() if rows}, **self.queue.jobs}

    @cached_property
    def arrays(self) -> Mapping[str, str]:
        """The ids of these jobs, by the last words of their names: once for all runs that are searched for."""
        return job_arrays(self.jobs)


def live_jobs(workspace: Workspace, run_id: str, run: Run | None) -> list[str]:
    """The jobs of a run that have not ended, whether or not its directory exists.

    Args:
        workspace: Where the run is, or was.
        run_id: Its id, with which the names of its jobs end.
        run: What is known of it; None: nothing.

    Raises:
        SlurmDown: Slurm does not answer.
    """
    queue = workspace.scheduler.queue()
    if not queue.answered:
        raise SlurmDown(f"{queue.problem}; the job of run {run_id} may still be running; try again later")
    own = {attempt.job_id for attempt in run.attempts} if run else set()
    prefix = f"{workspace.root.run(run_id).submissions}/"
    for array_id, job_id in job_arrays(queue.jobs).items():
        with contextlib.suppress(OSError):
            for link in workspace.root.array(array_id).elements.iterdir():
                if f"{link.readlink()}".startswith(prefix):
                    # The links of a pack also name the slots of its runs.
                    own.add(f"{job_id}_{link.name.partition('.')[0]}")
    name = run.name if run is not None else ""
    own |= {job.id for job in second_jobs(queue.jobs.values(), name).get(run_id, ())}
    return [
        job.id
        for job in queue.jobs.values()
        if (job.id in own or is_named_after(job, run_id, name)) and not is_final(job.state)
    ]


def look_at_slurm(workspace: Workspace, runs: Mapping[RunDir, Run]) -> SlurmLook:
    """Ask Slurm about all open runs at once, and journal what is new."""
    look = SlurmLook()
    open_runs = {directory: run for directory, run in runs.items() if may_change(run)}
    if not open_runs:
        return look
    with ExitStack() as locks:
        # Before Slurm is asked: a job not being submitted now, and unknown to Slurm afterwards, does not exist.
        orphans = _orphans(workspace, open_runs, locks)
        asked_at = time.time()
        queue = workspace.scheduler.queue()
        if not queue.answered:
            look.problems.append(f"{queue.problem}; these are the last known states")
        accounting = _accounting(workspace, open_runs, queue, orphans)
        if accounting is not None and not accounting.answered:
            look.problems.append(
                f"{accounting.problem}; runs whose jobs have ended may appear with their earlier state"
            )
        # The answers are used while the locks of orphans are held: no submission can make them wrong.
        answers = _Answers(queue, accounting, asked_at)
        for directory, run in open_runs.items():
            journal_news = _adopt_job if directory in orphans else _note
            if journal_news(workspace, directory, run, answers):
                look.changed.append(directory)
            job = queue.job(run.newest.job_id) if run.newest is not None else None
            if job is not None and not is_final(job.state):
                look.live[directory.id] = live_of(job)
    return look


def _accounting(
    workspace: Workspace, open_runs: Mapping[RunDir, Run], queue: Queue, orphans: Collection[RunDir]
) -> Accounting | None:
    """The answer of sacct; it is asked only if there is anything left that it may know."""
    asking = [run for d, run in open_runs.items() if (run.newest and run.newest.job_id) or d in orphans]
    asking = [run for run in asking if needs_accounting(run, queue)]
    if not asking or not queue.answered:
        return None
    newest = [run.newest for run in asking if run.newest is not None]
    ids = {attempt.job_id for attempt in newest if attempt.job_id}
    since = min((attempt.submitted_at or 0.0 for attempt in newest), default=0.0)
    return workspace.scheduler.accounting(ids, by_name=len(ids) < len(newest), since=since)


def _orphans(workspace: Workspace, runs: Mapping[RunDir, Run], locks: ExitStack) -> frozenset[RunDir]:
    """Runs whose submission died without journaling a job, and which no process here can still submit.

    ``locks`` receives the locks of these runs, so that no submission begins meanwhile.
    """
    from slurmtrain.runtime.environment.process_limits import make_room
    from slurmtrain.slurm.slurm_launch import is_submitting

    make_room(len(runs))
    unlocked: dict[RunDir, Attempt] = {}
    for directory, run in runs.items():
        newest = run.newest
        if newest is None or newest.job_id or newest.handed_over or not directory.path.exists():
            continue
        # A run that cannot be written to is left to its owner.
        with contextlib.suppress(PathError):
            if locks.enter_context(locked(directory.lock, wait=False)) is not None:
                unlocked[directory] = newest
    # If a submission's journal has more than was read, the submission has ended since.
    ended = set(workspace.store.unread(list(unlocked)))
    # Of submissions from other machines, no process is here.
    submissions: dict[RunDir, SubmissionDir | ArrayDir] = {}
    for directory, newest in unlocked.items():
        if _from_here(newest):
            submission = directory.submission(newest.submission)
            element = _element(submission)
            submissions[directory] = submission if element is None else workspace.root.array(element[0])
    alive = {submission for submission in set(submissions.values()) if is_submitting(submission)}
    return frozenset(d for d in unlocked if d not in ended and submissions.get(d) not in alive)


def _element(submission: SubmissionDir) -> tuple[str, int] | None:
    """The id of the array whose element the job of a submission is, and the element's index; None: it is a job."""
    from slurmtrain.runtime.environment.node import read_launch

    with contextlib.suppress(PathError):
        launch = read_launch(submission)
        return None if launch is None else launch.array
    return None


def _adopt_job(workspace: Workspace, directory: RunDir, run: Run, answers: _Answers) -> bool:
    """Find the job of a submission that was killed, or note that there is none."""
    from slurmtrain.model.run.events.command_events import Submitted, Unstarted

    newest, queue, accounting = run.newest, answers.queue, answers.accounting
    assert newest is not None
    claimed = {attempt.job_id for attempt in run.attempts}
    element = _element(directory.submission(newest.submission))
    if element is None:
        job_id = find_unclaimed_job(answers.jobs, run.id, run.name, claimed)
    else:
        # One call of sbatch makes all elements, whichever of them are listed by now.
        array = answers.arrays.get(element[0])
        job_id = None if array is None else f"{array}_{element[1]}"
    if job_id is not None:
        with workspace.journal(directory, "adopt") as journal:
            journal.write(Submitted(submission=newest.submission, job_id=job_id, adopted=True))
        return True
    # A cached answer, older than the search for the submission, can prove that a job exists, never that none does.
    both = queue.answered and accounting is not None and accounting.answered
    sure = both and accounting is not None and min(queue.at, accounting.at) >= answers.asked_at
    if not sure or not (_from_here(newest) or time.time() - (newest.submitted_at or 0.0) > GIVEN_UP_S):
        return False
    with workspace.journal(directory, "adopt") as journal:
        reason = "its submission was killed before Slurm had the job"
        journal.write(Unstarted(submission=newest.submission, reason=reason))
    return True


def _from_here(attempt: Attempt) -> bool:
    return attempt.submitted_from in (None, socket.gethostname())


def _note(workspace: Workspace, directory: RunDir, run: Run, answers: _Answers) -> bool:
    """Journal what Slurm's answers add to what is known about a run."""
    observations = new_observations(run, answers.queue, answers.accounting, time.time())
    if not observations:
        return False
    # What cannot be written now, as on a full disk, is observed again by the next command.
    with contextlib.suppress(OSError), workspace.journal(directory, "observe") as journal:
        for observed in observations:
            journal.write(_with_files(directory, run, observed))
        states = [base(observed.state or "") for observed in observations]
        if any(CAUSE_OF_STATE.get(state) == "cancelled" for state in states) and run.newest:
            from slurmtrain.runtime.job import lease

            # A user who cancels the job wants the run ended, even if Slurm is later told to start the job again.
            lease.close(directory, run.newest.submission, "cancelled")
    return True


def _with_files(directory: RunDir, run: Run, observed: JobObserved) -> JobObserved:
    """The observation; for a start that has ended, completed with what its files show, as it may not be journaled."""
    if not is_final(observed.state or ""):
        return observed
    place = directory.attempt(observed.job_id or "", observed.restart)
    attempt = next((attempt for attempt in run.attempts if attempt.key == place.path.name), None)
    reason, nodes = observed.reason, observed.nodes
    # In these states Slurm has ended the job, not an error of its own: its last output explains nothing.
    is_slurms = base(observed.state or "") in ("CANCELLED", "PREEMPTED", "NODE_FAIL", "REQUEUED", "BOOT_FAIL")
    if reason is None and not (attempt and attempt.hosts) and not is_slurms:
        # Its agents journaled nothing: the last output of the job may tell why.
        submission = directory.submission(run.newest.submission if run.newest else 0)
        pattern = f"{observed.job_id}_*_log.out"
        logs = sorted(submission.submitit.glob(pattern))
        if not logs and (element := _element(submission)) is not None:
            # What the batch script of a pack printed, before or instead of starting its tasks.
            logs = sorted(RunsRoot(directory.path.parent).array(element[0]).submitit.glob(pattern))
        silent = "its log is empty"
        if not logs:
            silent = f"it left no log; perhaps nodes {nodes} cannot see {directory.path} or write to it"
        reason = next((line for log in logs if (line := last_error_line(log))), silent)
    checkpoints = checkpoints_on_disk(directory)
    return replace(observed, last_seen=last_written_at(place, attempt), checkpoints=checkpoints, reason=reason)


def holder(live: Live) -> str:
    """Who holds a job: ``user``; ``slurm``, after too many starts; ``admin``, which may stand for Slurm; else empty.

    Until 24.05 a held job is pending; since then some are in a state of their own (seen on 22.05, 24.11 and 26.05).
    """
    reason = bare_reason(live.code)
    if live.state != "PENDING" and live.state not in HELD:
        return ""
    if reason in HELD_BY_SLURM:
        return "slurm"
    if reason == HELD_BY_ADMIN:
        return "admin"
    return "user" if live.state in HELD or reason in HELD_BY_USER else ""


def live_of(job: Job) -> Live:
    """What a user wants to know about a job that is not over."""
    state = base(job.state)
    if state == "PENDING" or state in HELD:
        reason = describe_reason(job.reason, job.id)
        return Live(state=state, code=job.reason, reason=reason, starts_at=job.starts_at, priority=job.priority)
    reason = _IN_WORDS.get(state, f"Slurm says {job.state}")
    # squeue does not say since when a job is suspended.
    with contextlib.suppress(SlurmDown):
        if state == SUSPENDED:
            record = read_job(run_command("scontrol", "show", "job", job.id))
            since = read_time(record.get("SuspendTime", ""))
            reason += "" if since is None else f" since {iso(since)}"
    return Live(state=state, nodes=job.nodes, reason=reason)


_IN_WORDS = {
    "RUNNING": "Slurm has started it; it is being set up",
    "CONFIGURING": "its nodes are being prepared",
    "COMPLETING": "its last processes are exiting",
    SUSPENDED: "Slurm has suspended it",
}
