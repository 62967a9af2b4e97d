"""What Slurm knows of the order of runs: the dependencies of their jobs.

A job is submitted to start after the newest jobs of the run's upstreams. When an upstream gets another job, whoever
submits that moves the jobs behind it. If this fails, or is killed, they start too early, and put themselves back.
"""

from __future__ import annotations

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace


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
    move_behind(job, dependency_of(current_plan(directory, run), after, singleton=_has_predecessor(run)))
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
