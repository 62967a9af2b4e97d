"""Starting attempts of several runs with one job array. If it is killed at any point, none is started twice or lost.

Each run goes through what ``ops/shared/start`` describes, all of them one step at a time, first attempts as well as
later ones:

1. ``arrays/<id>/``: litter until something names it.
2. ``submissions/<n>/`` of each run, whose ``launch.json`` names the array and the element; and the array's link to it.
   The runs of a pack are of the same element; ``launch.json`` and the link also name their slots.
3. The ``submitting`` event and the lease of each run.
4. One sbatch. The name of the job array ends with the array's id: by that, and by their ``launch.json``, the runs find
   their elements again. If it was never called, all of them are as if they had just been created.
5. The ``submitted`` event of each run.

The process that calls sbatch inherits the locks of all runs. It is started after 1, and calls nothing before 4.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from subprocess import Popen

from slurmtrain.errors import LaunchError, PathError, RequestRefused, RunBusy, RunCancelled, SubmissionUncertain
from slurmtrain.model.run.events.command import Submitted
from slurmtrain.model.run.ids import run_id
from slurmtrain.model.run.layout import RunDir, SubmissionDir
from slurmtrain.model.run.root import ArrayDir
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.ops.shared.chain.alone import jobs_of_namesakes
from slurmtrain.ops.shared.chain.jobs import move_dependents, unfinished_upstream_jobs
from slurmtrain.ops.shared.interrupt import uninterrupted
from slurmtrain.ops.shared.interruption_stats import PartitionStats, outlook
from slurmtrain.ops.shared.mirroring.targets import mlflow_server
from slurmtrain.ops.shared.node_ledger import exclusions
from slurmtrain.ops.shared.start import (
    ArrayPlace,
    NewAttempt,
    cancel_job,
    cancels,
    placed_attempt,
    prepare,
    record_job,
    release_claim,
    submitting_event,
    withdraw,
)
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.surroundings import of_sbatch
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import describe_os_error, durable_together, make_directory, make_new_directory
from slurmtrain.system.journal import Journal, command_journal


@dataclass(frozen=True, slots=True)
class Element:
    """An attempt to start as an element of a job array. ``lock``: the descriptor of its run's lock, which is held."""

    run: RunDir
    lock: int
    attempt: NewAttempt


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An element whose run is ready for it, and the journal of this command there.

    ``index``: the element's in the array. ``pack``: how several runs share it.
    """

    element: Element
    submission: SubmissionDir
    journal: Journal
    index: int
    pack: Pack | None


def start_array(
    workspace: Workspace,
    elements: Sequence[Element],
    *,
    command: str,
    at_once: int | None = None,
    pack: Pack | None = None,
) -> list[str]:
    """Start attempts as the elements of a job array, or as packs, each an element; returns notes for the user.

    A run whose next attempt another command has claimed is left to that, which a note says.

    Args:
        workspace: where the runs are.
        elements: what to start; all request the same, and no job of theirs is left.
        command: the command that starts them, for the journals.
        at_once: how many of the array's jobs may run at once; None: all.
        pack: how runs share an element's job; None: each has its own. There are as many as fill all jobs.

    Raises:
        LaunchError: they could not be submitted; the runs are as they were before.
        SubmissionUncertain: the job array may exist, and the runs wait for ``sync`` to find out.
        PathError: the runs root cannot be written; there is no job.
        RequestRefused: Slurm does not accept the job array; the runs are as they were before.
        RunBusy: another command has claimed the next attempt of each.
    """
    from slurmtrain.slurm.launch import launcher_in

    environ = of_sbatch()
    placed = [replace(each, attempt=placed_attempt(each.attempt, environ)) for each in elements]
    first = placed[0].attempt
    excluded = exclusions(workspace, first.plan, first.excluded_nodes, slurm=True)
    stats = outlook(workspace, elements[0].run.id, first.plan, first.executor)
    placed = [replace(each, attempt=replace(each.attempt, excluded_nodes=excluded.nodes)) for each in placed]
    with uninterrupted(), ExitStack() as stack:
        array = _new_array(workspace)
        try:
            # Before the runs are prepared, since it needs as long until it is ready for its order.
            locks = [each.lock for each in placed]
            launcher = stack.enter_context(launcher_in(array.submitit, locks, first.secrets))
            prepared, busy = _prepare_all(workspace, array, placed, stats, command, pack)
        except BaseException:
            shutil.rmtree(array.path, ignore_errors=True)
            raise
        try:
            _announce(array, prepared, stats.partition, command)
            others = jobs_of_namesakes(workspace, first.plan.spec)
            job_id = _launch(launcher, array, prepared, locks, at_once, others)
        except SubmissionUncertain:
            raise
        except (LaunchError, RequestRefused, OSError) as error:
            for each in prepared:
                withdraw(each.journal, each.element.attempt, each.submission, None, error)
                each.journal.close()
            shutil.rmtree(array.path, ignore_errors=True)
            raise _unwritable(array, error) if isinstance(error, OSError) else error from error
        notes = _record_all(prepared, job_id)
    # Its answers so far are from before these jobs.
    workspace.scheduler.forget()
    notes += move_dependents(workspace, [each.element.run for each in prepared])
    return [*excluded.notes, *stats.notes, *busy, *notes, *_cancel_cancelled(workspace, prepared, job_id)]


def _new_array(workspace: Workspace) -> ArrayDir:
    """A directory for a new job array, whose id no run has. Raises PathError."""
    make_directory(workspace.root.arrays)
    while True:
        name = run_id(time.time_ns() // 1_000_000, secrets.randbits(10))
        array = workspace.root.array(name)
        try:
            if workspace.root.run(name).path.exists():
                continue
            make_new_directory(array.path)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(array, error) from error
        return array


def _prepare_all(
    workspace: Workspace,
    array: ArrayDir,
    elements: Sequence[Element],
    stats: PartitionStats,
    command: str,
    pack: Pack | None,
) -> tuple[list[_Prepared], list[str]]:
    """Write what the elements read, and the links that lead them there; returns also notes on those left out.

    Args:
        workspace: where they are.
        array: their array.
        elements: what is started.
        stats: what is known about interruptions where they will run.
        command: the command that starts them.
        pack: how they share jobs; None: not at all.

    Raises:
        PathError: something cannot be written.
        RunBusy: all are left out or, of runs that share jobs, one.
    """
    prepared: list[_Prepared] = []
    busy = []
    try:
        with durable_together(array.path):
            make_directory(array.submitit)
            make_directory(array.elements)
            for each in elements:
                server = mlflow_server(workspace, each.attempt.plan)
                index, slot = divmod(len(prepared), pack.runs if pack else 1)
                try:
                    submission = prepare(each.run, each.attempt, stats, server, ArrayPlace(array.id, index, pack, slot))
                except RunBusy as error:
                    if pack is not None:
                        raise
                    busy.append(str(error))
                    continue
                # Slurm writes the output of the job there.
                make_directory(submission.submitit)
                array.element(index, slot if pack else None).symlink_to(submission.path)
                journal = command_journal(each.run.journals, command)
                prepared.append(_Prepared(each, submission, journal, index, pack))
    except BaseException as error:
        for claimed in prepared:
            release_claim(claimed.element.attempt)
        if isinstance(error, OSError):
            raise _unwritable(array, error) from error
        raise
    if not prepared:
        raise RunBusy("; ".join(busy))
    return prepared, busy


def _announce(array: ArrayDir, prepared: Sequence[_Prepared], partition: str, command: str) -> None:
    """Journal that the elements are about to be submitted, and give them the leases of their runs. Raises OSError."""
    with durable_together(array.path):
        for each in prepared:
            attempt = each.element.attempt
            with each.journal as journal:
                event = submitting_event(attempt, each.submission, None, partition, command)
                journal.write(replace(event, pack=each.pack.to_dict() if each.pack else None))
            # Before the job exists, since an agent ends at once if the lease does not name its submission.
            lease.grant(each.submission)


def _launch(
    launcher: Popen[str],
    array: ArrayDir,
    prepared: Sequence[_Prepared],
    locks: Sequence[int],
    at_once: int | None,
    others: Sequence[str],
) -> str:
    """Submit the array; returns its job's id.

    ``launcher``: the process that calls sbatch. ``locks``: the handles that it holds. ``others``: jobs that must end
    first, beside the jobs of upstreams.
    """
    from slurmtrain.slurm.launch import ArrayRequest, launch_array

    first = prepared[0]
    attempt = first.element.attempt
    # All elements of an array start after the same runs (grouping.request_key).
    after = [*unfinished_upstream_jobs(first.element.run), *others]
    excluded = attempt.excluded_nodes
    request = ArrayRequest(attempt.plan, array, len(prepared), locks, at_once, excluded, first.pack, after)
    return launch_array(launcher, request)


def _record_all(prepared: Sequence[_Prepared], job_id: str) -> list[str]:
    """Journal the job of each run; returns notes on those where that fails."""
    notes = []
    for each in prepared:
        submitted = Submitted(submission=each.submission.number, job_id=f"{job_id}_{each.index}")
        # What is lost in a power failure is found again like the job of a command that was killed.
        with Journal(each.journal.path, durable=False) as journal:
            notes += record_job(journal, each.element.run, submitted)
    return notes


def _cancel_cancelled(workspace: Workspace, prepared: Sequence[_Prepared], job_id: str) -> list[str]:
    """End the elements whose runs were cancelled while they were being submitted; returns notes."""
    notes = []
    for each in prepared:
        if cancels(each.element.run) - each.element.attempt.cancels:
            submitted = Submitted(submission=each.submission.number, job_id=f"{job_id}_{each.index}")
            try:
                cancel_job(workspace, each.element.run, "slurm", submitted)
            except RunCancelled as error:
                notes.append(str(error))
    return notes


def _unwritable(array: ArrayDir, error: OSError) -> PathError:
    return PathError(f"cannot write to {array.path}: {describe_os_error(error)}")
