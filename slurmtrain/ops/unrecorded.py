"""Ending runs whose cancellation cannot be journaled: their directory was deleted, or its disk is full.

Nothing is read from the run directory. Its processes on this machine are known from the registry, from their command
lines and from the environment of ranks; its Slurm jobs from the registry and from their names, which end with the id.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from slurmtrain.errors import RunNotFound
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.local_jobs import processes_of
from slurmtrain.ops.shared.packs import is_needed_by_others
from slurmtrain.ops.shared.slurm_jobs import live_jobs
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job.lease import kill_leftovers
from slurmtrain.slurm.command import is_installed
from slurmtrain.slurm.parse import Job
from slurmtrain.system.process import Process, descendants

# Seconds that processes and jobs have to end before they are killed, or given up: a save needs some of it, where the
# directory still exists.
_PATIENCE_S = 45.0
_POLL_S = 0.1
_ASK_SLURM_S = 3.0


def end_unrecorded(
    workspace: Workspace, runs: Mapping[str, Run | None], why: Mapping[str, str], *, force: bool
) -> dict[str, Run]:
    """End runs, without a trace in their directories; returns each as it is then.

    Args:
        workspace: where the runs are, or were.
        runs: by id; None for a run that the registry does not know.
        why: why nothing can be journaled, by id, as a phrase.
        force: kill at once.

    Raises:
        RunNotFound: there is no job, no process and no record of a run.
        SlurmDown: Slurm does not answer.
    """
    local = [run_id for run_id, run in runs.items() if run is None or run.executor == "local"]
    ended = {run_id for run_id in local if _end_processes(workspace.root.run(run_id), runs[run_id], force=force)}
    on_slurm = [
        run_id for run_id, run in runs.items() if run_id not in ended and (run is None or run.executor == "slurm")
    ]
    jobs = _cancel_jobs(workspace, {run_id: runs[run_id] for run_id in on_slurm}, force=force)
    for run_id in on_slurm:
        if runs[run_id] is None and not jobs.get(run_id):
            raise RunNotFound(f"there is no run {run_id!r} here, and no job or process of it")
    live = _wait_for_jobs(workspace, jobs)
    outcomes = {run_id: _outcome(run_id, run, why[run_id], live.get(run_id, ())) for run_id, run in runs.items()}
    _note_deleted(workspace, [run_id for run_id in outcomes if outcomes[run_id].ended])
    return outcomes


def _note_deleted(workspace: Workspace, run_ids: Sequence[str]) -> None:
    """Note in the registry that runs without a directory have ended: no journal will ever say so."""
    deleted = [run_id for run_id in run_ids if not workspace.root.run(run_id).path.exists()]
    if deleted:
        now = time.time()
        workspace.store.write(lambda transaction: transaction.set_cancelled(deleted, now))


def _outcome(run_id: str, run: Run | None, why: str, live: Collection[str]) -> Run:
    """The run as it is now. ``live``: its jobs that have not ended."""
    before = run or Run(id=run_id, name="", state="running", reason="", executor="slurm" if live else "local")
    if live:
        return replace(before, reason=f"job {', '.join(live)} was cancelled, but has not ended yet; {why}")
    return replace(before, state="cancelled", reason=f"its job was ended; {why}")


# --- Slurm ------------------------------------------------------------------------------------------------------------
def _cancel_jobs(workspace: Workspace, runs: Mapping[str, Run | None], *, force: bool) -> dict[str, list[str]]:
    """Cancel the jobs of these runs, and return each run's jobs that had not ended. Raises SlurmDown."""
    if not runs or (not is_installed("squeue") and not any(runs.values())):
        return {}
    jobs = {
        run_id: live_jobs(workspace, run_id, run)
        for run_id, run in runs.items()
        if run is None or not is_needed_by_others(workspace, run)
    }
    ids = [job_id for of_run in jobs.values() for job_id in of_run]
    if ids:
        workspace.scheduler.cancel(ids, force=force)
    return jobs


def _wait_for_jobs(workspace: Workspace, jobs: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Wait for cancelled jobs to end; returns the jobs that have not."""
    deadline = time.monotonic() + _PATIENCE_S
    while any(jobs.values()):
        queue = workspace.scheduler.queue()
        live = {
            run_id: [job for job in of_run if not queue.answered or _is_live(queue.job(job))]
            for run_id, of_run in jobs.items()
        }
        if not any(live.values()) or time.monotonic() > deadline:
            return live
        time.sleep(_ASK_SLURM_S)
        workspace.scheduler.forget()
    return {}


def _is_live(job: Job | None) -> bool:
    return job is not None and not is_final(job.state)


# --- this machine -----------------------------------------------------------------------------------------------------
def _end_processes(directory: RunDir, run: Run | None, *, force: bool) -> bool:
    """End the processes of a local run; returns whether there were any."""
    processes = processes_of(directory, run)
    if not force:
        for process in processes:
            process.send(signal.SIGTERM)
        _wait_for(processes)
    for process in processes:
        # Its descendants are listed before it is killed: orphans could no longer be traced to the run.
        for each in [process, *descendants(process)]:
            each.send(signal.SIGKILL)
    return bool(kill_leftovers(directory)) or bool(processes)


def _wait_for(processes: Iterable[Process]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
