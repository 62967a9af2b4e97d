"""Runs that are active one at a time for each name: the meaning of ``slurm.dependency: singleton`` in a script.

Slurm compares the names of jobs, which end with the run's id here. So a run waits for the others of its name as for
runs in ``after``, however they end, and its job for jobs in Slurm's queue that belong to other runs roots of the same
account, or to scripts of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from slurmtrain.errors import LaunchError, RunBusy
from slurmtrain.model.run.ids import RUN_ID
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.spec.sbatch import is_singleton
from slurmtrain.model.spec.spec import Spec
from slurmtrain.ops.shared.observe import ListedRuns, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.locks import locked


def active_namesakes(runs: ListedRuns, name: str) -> list[str]:
    """The ids of the ``runs`` with this ``name`` that have not ended."""
    return [run_id for run_id, row in runs.named([name]).items() if row.name == name and not row.ended]


@contextlib.contextmanager
def only_one(workspace: Workspace, specs: Collection[Spec]) -> Iterator[None]:
    """Let no other command create runs of the names of these specs, as far as they are singletons.

    Args:
        workspace: where the runs are.
        specs: the specs of the runs that are about to be created.
    """
    with contextlib.ExitStack() as locks:
        # In one order, so that two commands cannot wait for each other.
        for name in sorted({spec.name for spec in specs if is_singleton(spec.slurm)}):
            workspace.prepare()
            locks.enter_context(locked(workspace.root.name_lock(name)))
        yield


def claim_name(
    workspace: Workspace, spec: Spec, run_id: str, locks: contextlib.ExitStack, names: dict[str, str] | None = None
) -> None:
    """Let a run be started again, as far as others of its name allow that if it is a singleton.

    Args:
        workspace: where it is.
        spec: its spec.
        run_id: its id.
        locks: receives the lock of the name.
        names: the runs that this command starts again already, by their names; the run is added to it.

    Raises:
        RunBusy: another run of the name is started, or has not ended.
    """
    if not is_singleton(spec.slurm):
        return
    rule, names = "'slurm.dependency: singleton' lets one of them run at a time", {} if names is None else names
    if spec.name in names:
        raise RunBusy(
            f"run {names[spec.name]} of the same name is started, and {rule}: 'slurmtrain resume {run_id}' once that "
            "has ended"
        )
    # Whoever holds it may wait for the lock of a run that this command holds.
    if locks.enter_context(locked(workspace.root.name_lock(spec.name), wait=False)) is None:
        raise RunBusy(f"another command is just starting a run of the name {spec.name}; try again in a moment")
    active = active_namesakes(observe(workspace, ask_slurm=False).runs, spec.name)
    others = [each for each in active if each != run_id]
    if others:
        raise RunBusy(
            f"run {run_id} cannot start now: run {others[0]} of the same name has not ended, and {rule}: "
            f"'slurmtrain wait {others[0]}', or cancel it"
        )
    names[spec.name] = run_id


def jobs_of_namesakes(workspace: Workspace, spec: Spec) -> list[str]:
    """The jobs of this account, of no run in this runs root, that the job of a run must wait for as a singleton.

    Args:
        workspace: where the run is, whose namesakes there are its upstreams.
        spec: its spec.

    Raises:
        LaunchError: Slurm does not say which there are.
    """
    if not is_singleton(spec.slurm):
        return []
    queue = workspace.scheduler.queue()
    if not queue.answered:
        raise LaunchError(
            f"'slurm.dependency: singleton' waits for other jobs of the name {spec.name}, and Slurm does not say which "
            f"there are: {queue.problem}; try again later"
        )
    waits = [job.id for job in queue.jobs.values() if not is_final(job.state) and _is_other(workspace, spec, job.name)]
    # Of an array all elements: their names are the same.
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in waits))


def _is_other(workspace: Workspace, spec: Spec, job_name: str) -> bool:
    """Whether a job has the name of a spec, and belongs to no run of this runs root."""
    name, _, run_id = job_name.rpartition("-")
    if name != spec.name or not RUN_ID.fullmatch(run_id):
        return job_name == spec.name
    return not (workspace.root.run(run_id).path.exists() or workspace.root.array(run_id).path.exists())
