"""Runs that start after others: jobs that wait for other runs' jobs, and the end of runs that wait for a failed one.

Jobs are made to wait by Slurm's dependencies. A run whose upstream will not complete is ended, with a reason that says
which: its job would find out itself once it starts, which may take days in a full queue. The agents of local runs see
it at once.

Runs are active one at a time for each name where a spec has ``slurm.dependency: singleton``. Slurm compares the names
of jobs, which end with the run's id here. So a run waits for the others of its name as for runs in ``after``, however
they end, and its job for jobs in Slurm's queue that belong to other runs roots of the same account, or to scripts of
that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slurmtrain.errors import LaunchError, PathError, RunBusy, SlurmDown, SlurmtrainError
from slurmtrain.model.experiment.slurm_options import is_singleton
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RUN_ID, RunDir
from slurmtrain.model.run.lineage import (
    EARLY,
    Upstream,
    standing,
)
from slurmtrain.ops.shared.observe import ListedRuns, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.upstreams import dependents_of, has_begun, read_upstreams
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

# Why Slurm does not start a job that is to look again later (squeue(1), JOB REASON CODES).
BEGIN_TIME = "BeginTime"


# --- one at a time ---------------------------------------------------------------------------------------------------


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
            # The lock's file is in the runs root, which may not exist yet.
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
        raise RunBusy(f"another command is starting a run named {spec.name} right now; try again in a moment")
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
            f"'slurm.dependency: singleton' waits for other jobs named {spec.name}, and Slurm does not list them: "
            f"{queue.problem}; try again later"
        )
    waits: dict[str, None] = {}
    for job in queue.jobs.values():
        name, _, run_id = job.name.rpartition("-")
        is_run = name == spec.name and RUN_ID.fullmatch(run_id) is not None
        is_here = is_run and (workspace.root.run(run_id).path.exists() or workspace.root.array(run_id).path.exists())
        if not is_final(job.state) and (is_run or job.name == spec.name) and not is_here:
            # Of an array all elements: their names are the same.
            waits[job.id.partition("_")[0]] = None
    return list(waits)


# --- ends ------------------------------------------------------------------------------------------------------------


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
        # What waits for these can never start either.
        candidates = [run_id for run_id in dependents(workspace, blocked) if run_id not in ended]
    if jobs:
        # If this is killed, or Slurm does not answer: what starts sees that the run is over, and ends at once.
        with contextlib.suppress(SlurmDown):
            workspace.scheduler.cancel(jobs, force=False)
    return ended


def dependents(workspace: Workspace, run_ids: Collection[str]) -> list[str]:
    """The runs that start after any of these, and exist."""
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
    ids = [upstream.run for upstream in read_upstreams(directory)]
    if ids:
        observe(workspace, ids, ask_slurm=ask_slurm)


def upstream_problem(workspace: Workspace, directory: RunDir) -> str:
    """Why a run cannot start, as far as the registry knows its upstreams; empty if it may."""
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
            # Its holder is starting or ending it: a later command looks again.
            if lock is None:
                return ""
            # Again: somebody may have started the other run meanwhile.
            observe_upstreams(workspace, directory, ask_slurm=False)
            observe(workspace, [run_id], ask_slurm=False)
            run = workspace.store.load(run_id)
            problem, newest = upstream_problem(workspace, directory), run.newest if run is not None else None
            if run is None or newest is None or run.executor != "slurm" or run.ended or run.unreadable:
                return ""
            # It waits in Slurm's queue.
            waits = newest.restarted_by is not None or (newest.state in ("pending", "requeued") and not newest.hosts)
            if problem and newest.job_id and waits:
                # Imported here: most commands end nothing.
                from slurmtrain.model.run.events.command_events import UpstreamFailed
                from slurmtrain.runtime.job import lease

                ended = UpstreamFailed(job_id=newest.job_id, restart=newest.restart, reason=problem)
                with contextlib.suppress(OSError), workspace.journal(directory, "chain") as journal:
                    journal.write(ended)
                    lease.close(directory, None, "failed")
                jobs.append(newest.job_id)
                return problem
    return ""


# --- jobs ------------------------------------------------------------------------------------------------------------


def unfinished_upstream_jobs(run: RunDir) -> list[str]:
    """The jobs that must end before a job of this run starts."""
    upstreams = read_upstreams(run)
    if not upstreams or has_begun(run):
        return []
    from slurmtrain.runtime.upstreams import unfinished_jobs

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
    return _move(workspace, list(dict.fromkeys(run_id for run in runs for run_id in dependents_of(run))))


def move_late(workspace: Workspace, run_ids: Iterable[str]) -> list[str]:
    """Let jobs that look again later whether it is their turn start as soon as it is; returns notes.

    Whoever has submitted another job for an upstream may have been killed before it moved the jobs behind it, and
    nobody moves them if an upstream ends without another job.

    Args:
        workspace: Where they are.
        run_ids: Runs whose jobs Slurm starts at a later time; what is known of them and their upstreams is up to date.
    """
    due = []
    for run_id in run_ids:
        directory, run = workspace.root.run(run_id), workspace.store.load(run_id)
        upstreams = upstreams_of(directory)
        if run is None or not upstreams or has_begun(directory) or not _was_early(run):
            continue
        stands = standing(upstreams, upstream_runs(workspace, upstreams))
        waits = [] if stands.is_ready else upstream_runs(workspace, stands.waits).values()
        jobs = [workspace.scheduler.queue().job(each.newest.job_id) for each in waits if each.newest is not None]
        # It may start, or has a job to wait for instead.
        if stands.is_ready or any(job is not None and not is_final(job.state) for job in jobs):
            due.append(run_id)
    notes = _move(workspace, due)
    if due:
        workspace.scheduler.forget()
    return notes


def _move(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """Let the jobs of runs wait for their upstreams' jobs, if they still wait at all; returns notes."""
    from slurmtrain.slurm.parse import join_elements
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
            moves.setdefault(move[1], {})[move[0]] = run_id
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
        f"the job of run {run_ids[0]}{more} could not be made to wait for the jobs of earlier runs ({error}): if it "
        "starts too early, it goes back into the queue"
    )


def _move_of(
    directory: RunDir, upstream_jobs: dict[tuple[str, ...], Sequence[str]]
) -> tuple[str, tuple[str, bool]] | None:
    """The waiting job of a run, its dependency, and whether this waits for nothing any more; None if it has none.

    ``upstream_jobs``: jobs of the upstreams, by the upstreams' ids: the runs of a sweep share them. Raises PathError.
    """
    from slurmtrain.ops.shared.next_attempts import current_plan
    from slurmtrain.runtime.job.run_reader import read_run
    from slurmtrain.runtime.upstreams import unfinished_jobs
    from slurmtrain.slurm.request import dependency_of

    # Of thousands that are being submitted, none has a job yet.
    if not any(directory.submissions.glob("*")) or has_begun(directory):
        return None
    run = read_run(directory)
    newest = run.newest
    if newest is None or run.executor != "slurm" or not newest.job_id:
        return None
    if newest.state not in ("pending", "requeued") and newest.restarted_by != "slurm":
        return None
    upstreams = read_upstreams(directory)
    key = tuple(upstream.run for upstream in upstreams)
    if key not in upstream_jobs:
        upstream_jobs[key] = unfinished_jobs(directory, upstreams)
    after = [*upstream_jobs[key], *earlier_elements(run)]
    has_predecessor = len({attempt.job_id for attempt in run.attempts if attempt.job_id}) > 1
    dependency = dependency_of(current_plan(directory, run), after, singleton=has_predecessor)
    # One that has not started yet may have to wait for a time that its spec says.
    return newest.job_id, (dependency, _was_early(run))


def _was_early(run: Run) -> bool:
    """Whether the last start of a run was before its turn: its job may wait for the time to look again."""
    return next((attempt.cause for attempt in reversed(run.attempts) if attempt.cause), None) == EARLY


def upstreams_of(directory: RunDir) -> list[Upstream]:
    """The runs that one starts after; empty if that cannot be read."""
    with contextlib.suppress(PathError):
        return read_upstreams(directory)
    return []
