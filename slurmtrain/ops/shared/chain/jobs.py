"""What Slurm knows of the order of runs: the dependencies of their jobs.

A job is submitted to start after the newest jobs of the run's upstreams. When an upstream gets another job, whoever
submits that moves the jobs behind it. If this fails, or is killed, they start too early, and put themselves back:
behind that job if it is there, else until they look again, some time later; ``sync`` sees to it that they need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.run.chain.upstreams import EARLY, Upstream, standing
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.chain.ending import upstream_runs
from slurmtrain.ops.shared.workspace import Workspace

# Why Slurm does not start a job that is to look again later (squeue(1), JOB REASON CODES).
BEGIN_TIME = "BeginTime"


def unfinished_upstream_jobs(run: RunDir) -> list[str]:
    """The jobs that must end before a job of this run starts."""
    from slurmtrain.runtime.chain.files import has_begun, read_upstreams

    upstreams = read_upstreams(run)
    if not upstreams or has_begun(run):
        return []
    from slurmtrain.runtime.chain.turn import unfinished_jobs

    return unfinished_jobs(run, upstreams)


def move_dependents(workspace: Workspace, run: RunDir) -> list[str]:
    """Let the waiting jobs of all runs that start after this one wait for its newest job too; returns notes.

    Args:
        workspace: Where they are.
        run: A run that has just got a job.
    """
    from slurmtrain.runtime.chain.files import dependents_of, has_begun

    notes = []
    for run_id in dependents_of(run):
        directory = workspace.root.run(run_id)
        try:
            if directory.path.is_dir() and not has_begun(directory):
                notes += _move(directory)
        except (PathError, SlurmDown) as error:
            notes.append(f"run {run_id} starts after run {run.id}, but its job could not be put behind ({error})")
    return notes


def move_late(workspace: Workspace, run_ids: Iterable[str]) -> list[str]:
    """Let jobs that look again later whether it is their turn start as soon as it is; returns notes.

    Whoever has submitted another job for an upstream may have been killed before it moved those behind it, and nobody
    does where an upstream ends without another job.

    Args:
        workspace: Where they are.
        run_ids: Runs whose jobs Slurm starts at a later time; what is known of them and their upstreams is up to date.
    """
    from slurmtrain.runtime.chain.files import has_begun, read_upstreams

    notes = []
    for run_id in run_ids:
        directory, run = workspace.root.run(run_id), workspace.store.load(run_id)
        try:
            upstreams = read_upstreams(directory)
            if run is None or not upstreams or has_begun(directory) or not _was_early(run):
                continue
            stands = standing(upstreams, upstream_runs(workspace, upstreams))
            if stands.is_ready or _is_any_queued(workspace, stands.waits):
                notes += _move(directory)
                workspace.scheduler.forget()
        except (PathError, SlurmDown) as error:
            notes.append(f"run {run_id} could start, but its job cannot be told so ({error}): it looks again itself")
    return notes


def _is_any_queued(workspace: Workspace, upstreams: Sequence[Upstream]) -> bool:
    """Whether Slurm has a job of any of these runs."""
    queue = workspace.scheduler.queue()
    for run in upstream_runs(workspace, upstreams).values():
        job = queue.job(run.newest.job_id) if run.newest is not None and run.newest.job_id else None
        if job is not None and not is_final(job.state):
            return True
    return False


def _move(directory: RunDir) -> list[str]:
    """Let the job of a run wait for those of its upstreams, if it still waits at all; returns notes."""
    from slurmtrain.ops.shared.current_plan import current_plan
    from slurmtrain.runtime.job.run_reader import read_run
    from slurmtrain.slurm.request import dependency_of
    from slurmtrain.slurm.requeue import move_behind

    run = read_run(directory)
    job = _waiting_job(run)
    if job is None:
        return []
    after = unfinished_upstream_jobs(directory)
    dependency = dependency_of(current_plan(directory, run), after, singleton=_has_predecessor(run))
    # One that has not started yet may have to wait for a time that its spec says.
    move_behind(job, dependency, at_once=_was_early(run))
    return []


def _waiting_job(run: Run) -> str | None:
    """The job of a run that may wait in the queue; None if there is none."""
    newest = run.newest
    if newest is None or run.executor != "slurm" or not newest.job_id:
        return None
    waits = newest.state in ("pending", "requeued") or newest.restarted_by == "slurm"
    return newest.job_id if waits else None


def _has_predecessor(run: Run) -> bool:
    return len({attempt.job_id for attempt in run.attempts if attempt.job_id}) > 1


def _was_early(run: Run) -> bool:
    """Whether the last start of a run was before its turn: its job may wait for the time to look again."""
    return next((attempt.cause for attempt in reversed(run.attempts) if attempt.cause), None) == EARLY
