"""What Slurm knows of the order of runs: the dependencies of their jobs.

A job is submitted to start after the newest jobs of the run's upstreams. When an upstream gets another job, whoever
submits that moves the jobs behind it. If this fails, or is killed, they start too early, and put themselves back:
behind that job if it is there, else until they look again, some time later; ``sync`` sees to it that they need not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, SlurmDown, SlurmtrainError
from slurmtrain.model.run.chain.upstreams import EARLY, Upstream, standing
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.chain.ending import upstream_runs
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

# Why Slurm does not start a job that is to look again later (squeue(1), JOB REASON CODES).
BEGIN_TIME = "BeginTime"


def unfinished_upstream_jobs(run: RunDir) -> list[str]:
    """The jobs that must end before a job of this run starts."""
    from slurmtrain.runtime.chain import has_begun, read_upstreams

    upstreams = read_upstreams(run)
    if not upstreams or has_begun(run):
        return []
    from slurmtrain.runtime.chain import unfinished_jobs

    return unfinished_jobs(run, upstreams)


def earlier_elements(run: Run) -> list[str]:
    """The elements of job arrays that earlier submissions of a run became: its newest job must wait for them.

    Slurm compares the names of jobs for ``--dependency=singleton`` (sbatch(1)), and an array's name differs from the
    name of a run's own job. A pack is left out: its job goes on with other runs.

    Args:
        run: The run; its newest submission has a job of its own, or is about to get it.
    """
    newest = run.newest
    before = [attempt for attempt in run.attempts if newest is not None and attempt.submission != newest.submission]
    return list(dict.fromkeys(each.job_id for each in before if "_" in each.job_id and each.pack < 2))


def move_dependents(workspace: Workspace, runs: Iterable[RunDir]) -> list[str]:
    """Let the waiting jobs of all runs that start after any of these wait for the newest jobs of these; returns notes.

    Args:
        workspace: Where they are.
        runs: Runs that have just got jobs.
    """
    from slurmtrain.runtime.chain import dependents_of

    return _move(workspace, list(dict.fromkeys(run_id for run in runs for run_id in dependents_of(run))))


def move_late(workspace: Workspace, run_ids: Iterable[str]) -> list[str]:
    """Let jobs that look again later whether it is their turn start as soon as it is; returns notes.

    Whoever has submitted another job for an upstream may have been killed before it moved the jobs behind it, and
    nobody moves them if an upstream ends without another job.

    Args:
        workspace: Where they are.
        run_ids: Runs whose jobs Slurm starts at a later time; what is known of them and their upstreams is up to date.
    """
    due = [run_id for run_id in run_ids if _is_late(workspace, run_id)]
    notes = _move(workspace, due)
    if due:
        workspace.scheduler.forget()
    return notes


def _is_late(workspace: Workspace, run_id: str) -> bool:
    """Whether a run that looks again later may start, or has a job to wait for instead."""
    from slurmtrain.runtime.chain import has_begun, read_upstreams

    directory, run = workspace.root.run(run_id), workspace.store.load(run_id)
    with contextlib.suppress(PathError):
        upstreams = read_upstreams(directory)
        if run is not None and upstreams and not has_begun(directory) and _was_early(run):
            stands = standing(upstreams, upstream_runs(workspace, upstreams))
            return stands.is_ready or _is_any_queued(workspace, stands.waits)
    return False


def _is_any_queued(workspace: Workspace, upstreams: Sequence[Upstream]) -> bool:
    """Whether Slurm has a job of any of these runs."""
    queue = workspace.scheduler.queue()
    for run in upstream_runs(workspace, upstreams).values():
        job = queue.job(run.newest.job_id) if run.newest is not None and run.newest.job_id else None
        if job is not None and not is_final(job.state):
            return True
    return False


def _move(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """Let the jobs of runs wait for their upstreams' jobs, if they still wait at all; returns notes."""
    from slurmtrain.slurm.jobs import join_elements
    from slurmtrain.slurm.requeue import move_behind

    moves: dict[tuple[str, bool], dict[str, str]] = {}
    upstream_jobs: dict[tuple[str, ...], Sequence[str]] = {}
    notes = []
    for run_id in run_ids:
        try:
            move = _move_of(workspace.root.run(run_id), upstream_jobs)
        except PathError as error:
            notes.append(_describe_failure([run_id], error))
            continue
        if move is not None:
            moves.setdefault((move.dependency, move.at_once), {})[move.job_id] = run_id
    for (dependency, at_once), jobs in moves.items():
        for elements in join_elements(jobs):
            try:
                move_behind(elements, dependency, at_once=at_once)
            except SlurmDown as error:
                array = elements.partition("_")[0]
                ids = [run_id for job_id, run_id in jobs.items() if job_id.partition("_")[0] == array]
                notes.append(_describe_failure(ids, error))
    return notes


def _describe_failure(run_ids: Sequence[str], error: SlurmtrainError) -> str:
    more = f" and {len(run_ids) - 1} more" if len(run_ids) > 1 else ""
    return (
        f"the job of run {run_ids[0]}{more} could not be put behind those of the runs that it starts after ({error}): "
        "if it starts too early, it goes back into the queue"
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """What a pending job is to wait for. ``at_once``: and for no time any more."""

    job_id: str
    dependency: str
    at_once: bool


def _move_of(directory: RunDir, upstream_jobs: dict[tuple[str, ...], Sequence[str]]) -> _Move | None:
    """How the job of a run is to be moved; None if it has begun, or has none. Raises PathError.

    ``upstream_jobs``: jobs of the upstreams, by the upstreams' ids: the runs of a sweep share them.
    """
    from slurmtrain.ops.shared.current_plan import current_plan
    from slurmtrain.runtime.chain import has_begun, read_upstreams, unfinished_jobs
    from slurmtrain.runtime.job.run_reader import read_run
    from slurmtrain.slurm.request import dependency_of

    # Of thousands that are being submitted, none has a job yet.
    if not any(directory.submissions.glob("*")) or has_begun(directory):
        return None
    run = read_run(directory)
    job = _waiting_job(run)
    if job is None:
        return None
    upstreams = read_upstreams(directory)
    key = tuple(upstream.run for upstream in upstreams)
    if key not in upstream_jobs:
        upstream_jobs[key] = unfinished_jobs(directory, upstreams)
    after = [*upstream_jobs[key], *earlier_elements(run)]
    dependency = dependency_of(current_plan(directory, run), after, singleton=_has_predecessor(run))
    # One that has not started yet may have to wait for a time that its spec says.
    return _Move(job, dependency, at_once=_was_early(run))


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
