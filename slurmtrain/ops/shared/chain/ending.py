"""Ending runs that wait for one that will not complete: their reason says which, and nothing waits for ever.

Jobs of Slurm would find out themselves once they start, which may take days in a full queue. The agents of local runs
see it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.run.chain.upstreams import Upstream, standing
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run


def end_blocked(workspace: Workspace, run_ids: Iterable[str]) -> dict[str, str]:
    """End the waiting runs on Slurm among these that can never start, and runs that wait for them in turn.

    Args:
        workspace: Where they are.
        run_ids: Runs; the registry is up to date about them and the runs that they wait for.

    Returns:
        Why, by the ids of the runs that it has ended.
    """
    ended: dict[str, str] = {}
    jobs: list[str] = []
    candidates = list(run_ids)
    while candidates:
        blocked = {run_id: why for run_id in candidates if (why := _end_if_blocked(workspace, run_id, jobs))}
        ended |= blocked
        if blocked:
            observe(workspace, list(blocked), ask_slurm=False)
        candidates = [run_id for run_id in dependents(workspace, blocked) if run_id not in ended]
    if jobs:
        # If this is killed, or Slurm does not answer: what starts sees that the run is over, and ends at once.
        with contextlib.suppress(SlurmDown):
            workspace.scheduler.cancel(jobs, force=False)
    return ended


def dependents(workspace: Workspace, run_ids: Collection[str]) -> list[str]:
    """The runs that start after any of these, and exist."""
    from slurmtrain.runtime.chain import dependents_of

    ids = dict.fromkeys(each for run_id in run_ids for each in dependents_of(workspace.root.run(run_id)))
    present = workspace.present(ids)
    return [run_id for run_id in ids if run_id in present]


def observe_upstreams(workspace: Workspace, directory: RunDir, *, ask_slurm: bool = True) -> None:
    """Bring what is known of the runs that a run starts after up to date.

    Args:
        workspace: Where they are.
        directory: The run's.
        ask_slurm: Ask Slurm, if it may know more about any of them.
    """
    from slurmtrain.runtime.chain import read_upstreams

    ids = [upstream.run for upstream in read_upstreams(directory)]
    if ids:
        observe(workspace, ids, ask_slurm=ask_slurm)


def upstream_problem(workspace: Workspace, directory: RunDir) -> str:
    """Why a run cannot start, as far as the registry knows its upstreams; empty if it may."""
    from slurmtrain.runtime.chain import has_begun, read_upstreams

    upstreams = read_upstreams(directory)
    if not upstreams or has_begun(directory):
        return ""
    return standing(upstreams, upstream_runs(workspace, upstreams)).problem


def upstream_runs(workspace: Workspace, upstreams: Collection[Upstream]) -> Mapping[str, Run]:
    """The runs among these that exist, by id, as the registry has them."""
    ids = {upstream.run for upstream in upstreams}
    present = workspace.present(ids)
    return {run_id: run for run_id, run in workspace.store.load_all(ids).items() if run_id in present}


def _end_if_blocked(workspace: Workspace, run_id: str, jobs: list[str]) -> str:
    """End a waiting run if it can never start, and add its job to ``jobs``; returns why, or nothing."""
    directory = workspace.root.run(run_id)
    with contextlib.suppress(PathError):
        if not upstream_problem(workspace, directory):
            return ""
        with locked(directory.lock, wait=False) as lock:
            if lock is None:
                return ""
            # Again: somebody may have started the other run meanwhile.
            observe_upstreams(workspace, directory, ask_slurm=False)
            observe(workspace, [run_id], ask_slurm=False)
            run = workspace.store.load(run_id)
            problem = upstream_problem(workspace, directory)
            if problem and run is not None and _waits(run):
                jobs.append(_end(workspace, directory, run, problem))
                return problem
    return ""


def _waits(run: Run) -> bool:
    """Whether a run waits in Slurm's queue."""
    newest = run.newest
    if newest is None or run.executor != "slurm" or run.ended or run.unreadable or not newest.job_id:
        return False
    return newest.restarted_by is not None or (newest.state in ("pending", "requeued") and not newest.hosts)


def _end(workspace: Workspace, directory: RunDir, run: Run, problem: str) -> str:
    """Journal that a run is over, and why; returns the job that is to be cancelled."""
    from slurmtrain.model.run.events.command import UpstreamFailed
    from slurmtrain.runtime.job import lease

    newest = run.newest
    assert newest is not None
    with contextlib.suppress(OSError), workspace.journal(directory, "chain") as journal:
        journal.write(UpstreamFailed(job_id=newest.job_id, restart=newest.restart, reason=problem))
        lease.close(directory, None, "failed")
    return newest.job_id
