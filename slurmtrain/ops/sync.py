"""Reconciling: observe everything, finish what was left half-done, mirror to the tracking store."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, RequestRefused, SlurmDown, SlurmtrainError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.policy import decision
from slurmtrain.model.run.events.agent_events import JobRequeue, RequeueFailed
from slurmtrain.model.run.events.command_events import JobReplaced
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import AFTER
from slurmtrain.model.run.run import WAITING, Attempt, Run, base, is_final
from slurmtrain.ops.cancel import finish_cancel
from slurmtrain.ops.shared.current_plan import after_oom_overrides, current_plan
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.mirroring import mirror_runs
from slurmtrain.ops.shared.next_attempts import (
    HeldRun,
    NewAttempt,
    SweepLimit,
    cancels,
    group_attempts,
    is_needed_by_others,
    next_attempt,
)
from slurmtrain.ops.shared.observe import Observed, is_file_check_due, observe
from slurmtrain.ops.shared.start import check_executor, start
from slurmtrain.ops.shared.start_order import BEGIN_TIME, end_blocked, move_late
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.process_limits import make_room
from slurmtrain.runtime.job.lease import kill_leftovers, runs_with_processes
from slurmtrain.slurm.jobs import second_jobs
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed
    from slurmtrain.specfile import PlannedRun


# A submission takes far less than this from creating its directory to locking it.
_UNBORN_S = 5.0


@dataclass(slots=True)
class Synced:
    """The findings and actions of a sync, by run id.

    ``searched``: all runs of the searches that it looked at. ``pruned``: the runs among them that were pruned.
    """

    observed: Observed
    started: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    mirrored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)


def sync(workspace: Workspace, only: Collection[str] | None = None, *, track: bool = True) -> Synced:
    """Bring registry, runs and tracking store into agreement. This is idempotent.

    Args:
        workspace: Where the runs are.
        only: Observe and act on these runs only.
        track: Also send what is new to the tracking store.
    """
    synced = Synced(observe(workspace, only, thorough=only is not None or is_file_check_due(workspace)))
    _sweep_unborn(workspace)
    _advance_searches(workspace, only, synced)
    if not synced.observed.runs:
        return synced
    _end_leftovers(workspace, only, synced)
    acted = [*_finish_submissions(workspace, only, synced), *_finish_cancels(workspace, only, synced)]
    acted += _finish_requeues(workspace, only, synced)
    acted += _finish_chains(workspace, only, synced)
    _end_second_jobs(workspace, only, synced)
    if acted:
        synced.observed = _again(workspace, acted, synced)
    if track:
        _mirror(workspace, only, synced)
    return synced


def _advance_searches(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> None:
    """End runs that the pruners of searches would end, and submit the next runs of searches."""
    if not workspace.root.searches.is_dir():
        return
    from slurmtrain.ops.search.advance import advance_all

    advanced = advance_all(workspace, only)
    synced.searched += advanced.runs
    synced.pruned += [*advanced.pruned, *advanced.ending]
    synced.started += advanced.created
    synced.notes += advanced.notes
    synced.problems += advanced.problems
    if advanced.created or advanced.ending:
        synced.observed = _again(workspace, [*advanced.created, *advanced.ending], synced)


def _sweep_unborn(workspace: Workspace) -> None:
    """Remove run directories whose submission died before they were complete: their lock is free.

    Recent ones are left alone: their submission may be about to take the lock.
    """
    for directory in workspace.unborn():
        with contextlib.suppress(OSError, PathError):
            if time.time() - directory.path.stat().st_mtime > _UNBORN_S:
                with locked(directory.lock, wait=False) as dead:
                    if dead is not None:
                        shutil.rmtree(directory.path, ignore_errors=True)


def _end_leftovers(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> None:
    """Kill what the ranks of local runs have left running on this machine if their agent was killed."""
    with_processes = _among(runs_with_processes(), only)
    for run_id in synced.observed.runs.index_of(with_processes) if with_processes else ():
        run = _load(workspace, run_id)
        if run is None or run.executor != "local" or run.newest is None or not run.newest.ended or not _is_gone(run):
            continue
        killed = kill_leftovers(workspace.root.run(run_id))
        if killed:
            synced.notes.append(f"run {run_id}: killed what its last attempt had left running: {', '.join(killed)}")


def _end_second_jobs(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> None:
    """Cancel jobs that wait for more nodes of a run that does not run: its node 0 was killed before it could do so."""
    if workspace.scheduler.answered_at is None:
        return  # Slurm was not asked: then no run is open, and such a job ends by itself as soon as it starts
    queue = workspace.scheduler.queue()
    jobs = second_jobs([job for job in queue.jobs.values() if not is_final(job.state)])
    for run_id in synced.observed.runs.index_of(_among(list(jobs), only)) if jobs else ():
        run = _load(workspace, run_id)
        if run is None or run.state == "running":
            continue
        # A job of the person's own may have the id in its name.
        job_ids = [job.id for job in second_jobs(jobs[run_id], run.name).get(run_id, ())]
        if not job_ids:
            continue
        try:
            workspace.scheduler.cancel(job_ids, force=False)
            synced.notes.append(f"run {run_id}: cancelled job {', '.join(job_ids)}, which waited for more nodes of it")
        except SlurmDown as error:
            synced.problems.append(f"run {run_id}: job {', '.join(job_ids)} waits for more nodes of it: {error}")


def _finish_submissions(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> list[str]:
    """Start runs whose submission was killed between creating the run and starting its job.

    On Slurm, runs that request the same share a job array.
    """
    # Oldest first: a run is created after the runs that it waits for.
    created = sorted(
        run_id
        for run_id, listed in _open_runs(synced, only)
        if listed.state == "created" and not listed.row["cancelled"]
    )
    make_room(len(created))
    with contextlib.ExitStack() as locks:
        attempts: list[NewAttempt] = []
        # The run of each local sweep that was started last.
        last: dict[str, str] = {}
        for run_id in created:
            attempt = _first_attempt(workspace, run_id, last, locks, synced)
            if attempt is None:
                continue
            if attempt.executor == "slurm":
                attempts.append(attempt)
                continue
            _start_first(workspace, [attempt], synced, SweepLimit())
            if attempt.turn is not None:
                last[attempt.turn.sweep] = run_id
        for group, limit in group_attempts(workspace, attempts):
            _start_first(workspace, group, synced, limit)
    return synced.started


def _first_attempt(
    workspace: Workspace, run_id: str, last: Mapping[str, str], locks: contextlib.ExitStack, synced: Synced
) -> NewAttempt | None:
    """The first attempt of a run that has none, with the run's lock; None if another command has that.

    Args:
        workspace: where the run is.
        run_id: the run.
        last: the run of each local sweep that was started last, by the sweep's id.
        locks: receives the lock.
        synced: receives what is in the way.
    """
    directory = workspace.root.run(run_id)
    lock = locks.enter_context(locked(directory.lock, wait=False))
    if lock is None:
        return None
    held = HeldRun(directory, lock, cancels(directory))
    observe(workspace, [run_id])
    run = _load(workspace, run_id)
    if run is None or run.state != "created":
        return None
    try:
        plan = current_plan(directory, run)
        check_executor(workspace, run.executor, [plan])
        return next_attempt(workspace, held, run, _replan(plan), last.get(run.sweep or ""))
    except (SlurmtrainError, OSError) as error:
        synced.problems.append(f"run {run_id} cannot be started: {error}")
        return None


def _start_first(workspace: Workspace, group: Sequence[NewAttempt], synced: Synced, limit: SweepLimit) -> None:
    """Start first attempts that share a submission.

    Args:
        workspace: where they are.
        group: what is started.
        synced: receives what was done.
        limit: how many of them may run at once, and how they share jobs.
    """
    run_ids = [each.run.id for each in group]
    try:
        notes = start(workspace, group, command="sync", at_once=limit.parallel, pack=limit.pack)
    except (SlurmtrainError, OSError) as error:
        synced.problems.append(f"run {', '.join(run_ids)} cannot be started: {error}")
        return
    synced.notes += notes
    synced.started += run_ids


def _load(workspace: Workspace, run_id: str) -> Run | None:
    """A run as it was last read; None if it is unknown, or cannot be read now: then nothing may be done with it."""
    run = workspace.store.load(run_id)
    return None if run is None or run.unreadable else run


def _finish_cancels(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> list[str]:
    """End runs whose cancellation was requested by a command that was then killed."""
    wished = [
        run_id
        for run_id, listed in _open_runs(synced, only)
        if listed.row["cancelled"] and not (listed.ended or listed.unreadable)
    ]
    try:
        synced.cancelled += [run_id for run_id, run in finish_cancel(workspace, wished).items() if run.ended]
    except (SlurmtrainError, OSError) as error:
        synced.problems.append(str(error))
    return synced.cancelled


def _finish_requeues(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> list[str]:
    """Restart interrupted runs whose agents could not requeue their jobs."""
    acted = []
    for run_id, listed in _open_runs(synced, only):
        if listed.state != "requeued" or listed.row["cancelled"]:
            continue
        run = _load(workspace, run_id)
        if run is None or not (_held(listed) or (_is_due(run) and _is_gone(run))):
            synced.notes += _elsewhere(run)
            continue
        try:
            if _start_again(workspace, run_id, _held(listed), synced):
                acted.append(run_id)
        except (SlurmtrainError, OSError) as error:
            synced.problems.append(f"run {run_id} cannot be started again: {error}")
    return acted


def _finish_chains(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> list[str]:
    """End runs that wait for one that will not complete, and start runs whose turn it is."""
    waiting = {
        run_id: listed
        for run_id, listed in _open_runs(synced, only)
        if listed.state in ("pending", "requeued") and any(each.get("relation") == AFTER for each in listed.parents)
    }
    ended = end_blocked(workspace, waiting)
    synced.ended += ended
    synced.notes += [f"run {run_id} was ended: {why}" for run_id, why in ended.items()]
    later = [run_id for run_id, listed in waiting.items() if listed.live is not None and listed.live.code == BEGIN_TIME]
    synced.notes += move_late(workspace, [run_id for run_id in later if run_id not in ended])
    return synced.ended


def _held(listed: Listed) -> str:
    """Who holds a waiting job, as :func:`~slurmtrain.ops.shared.slurm_jobs.holder` has it; empty: nobody."""
    if listed.live is None:
        return ""
    from slurmtrain.ops.shared.slurm_jobs import holder

    return holder(listed.live)


def _start_again(workspace: Workspace, run_id: str, held: str, synced: Synced) -> bool:
    """Restart or release one run if due; returns whether anything was done. Raises a SlurmtrainError on failure."""
    directory = workspace.root.run(run_id)
    with locked(directory.lock, wait=False) as lock:
        if lock is None or not workspace.scheduler.should_retry(run_id):
            return False
        held_run = HeldRun(directory, lock, cancels(directory))
        observe(workspace, [run_id], ask_slurm=False)
        run = _load(workspace, run_id)
        if run is None or run.cancelled:
            return False
        if held in ("slurm", "admin") and _replace(workspace, directory, run, held):
            observe(workspace, [run_id], ask_slurm=False)
            run = _load(workspace, run_id)
        if run is not None and _is_due(run) and _is_gone(run):
            _submit_again(workspace, held_run, run, synced)
            return True
        if run is not None and held == "user" and _release(workspace, directory, run):
            synced.released.append(run_id)
            return True
    return False


def _is_due(run: Run) -> bool:
    """Whether a command must restart the run, and the delay after the failure is over."""
    newest = run.newest
    return newest is not None and newest.restarted_by == "sync" and time.time() >= (newest.again_at or 0.0)


def _is_gone(run: Run) -> bool:
    """Whether nothing of the last attempt is left here: a local one journals its end a moment before it exits."""
    return run.executor != "local" or alive(run) is False


def _elsewhere(run: Run | None) -> list[str]:
    """A note that a local run can only be restarted on another machine; empty if that is not so."""
    if run is None or run.executor != "local" or not _is_due(run) or alive(run) is not None or run.newest is None:
        return []
    host = next(str(process["host"]) for process in run.newest.processes)
    return [f"run {run.id} was interrupted on {host}: 'slurmtrain sync' starts it again there, and not here"]


def _replace(workspace: Workspace, directory: RunDir, run: Run, held: str) -> bool:
    """End a job, to replace it, that Slurm holds after too many starts and that its user cannot release.

    Source: MaxBatchRequeue in slurm.conf(5); that ``scontrol release`` is refused was observed on 26.05. ``held``: who
    holds it according to Slurm. Raises SlurmDown.
    """
    newest, before = run.newest, next(reversed(run.attempts[:-1]), None)
    if newest is None or newest.hosts or before is None or before.job_id != newest.job_id:
        return False
    if held == "admin":
        from slurmtrain.slurm.site import read_cluster

        if newest.restart < read_cluster(workspace.scheduler.config()).max_requeues:
            return False  # Slurm has no reason to hold it yet
    if before.policy is None or not decision(run.attempts[:-1], run.checkpoints).again:
        return False
    why = "Slurm holds its job, which was started too often"
    with workspace.journal(directory, "sync") as journal:
        journal.write(JobReplaced(job_id=newest.job_id, restart=newest.restart, why=why))
    workspace.scheduler.cancel([newest.job_id], force=False)
    return True


def _submit_again(workspace: Workspace, held: HeldRun, run: Run, synced: Synced) -> None:
    """Submit the next attempt of a run, without the nodes that earlier ones excluded; or give the run up.

    Raises a SlurmtrainError if a later try may succeed.
    """
    newest = run.newest
    assert newest is not None
    planned = _replan(current_plan(held.directory, run), after_oom_overrides(run))
    try:
        if newest.cause == "preflight" and not planned.plan.spec.preflight.exclude:
            raise RequestRefused("preflight.exclude is false")
        attempt = next_attempt(workspace, held, run, planned)
        check_executor(workspace, run.executor, [planned.plan])
        _end_last_job(workspace, run)
        excluded = {host for a in run.attempts if a.submission == newest.submission for host in a.excluded}
        attempt = replace(attempt, excluded_nodes=sorted(excluded), inherited=newest.inherited)
        synced.notes += start(workspace, [attempt], command="sync")
    except RequestRefused as error:
        with workspace.journal(held.directory, "sync") as journal:
            why = f"it cannot start again: {error}"
            journal.write(RequeueFailed(job_id=newest.job_id, restart=newest.restart, reason=why))
        return
    synced.started.append(run.id)


def _replan(plan: Plan, overrides: Sequence[str] = ()) -> PlannedRun:
    # Imported here: hardly any sync starts anything.
    from slurmtrain.slurm.slurm_commands import read_options
    from slurmtrain.specfile import replan

    return replan(plan, overrides, read_options)


def _end_last_job(workspace: Workspace, run: Run) -> None:
    """Cancel the last job if it still waits: the next one would wait for it forever (``singleton``).

    A replaced job is still there if Slurm did not answer, or if the command was killed. Raises SlurmDown.
    """
    if run.executor != "slurm" or run.newest is None or is_needed_by_others(workspace, run):
        return
    queue = workspace.scheduler.queue()
    if not queue.answered:
        raise SlurmDown(queue.problem)
    job = queue.job(run.newest.job_id)
    if job is not None and base(job.state) in WAITING:
        workspace.scheduler.cancel([job.id], force=False)


def _release(workspace: Workspace, directory: RunDir, run: Run) -> bool:
    """Release a job that was held because it could not be requeued properly."""
    refused = _refused_start(run)
    if refused is None:
        return False
    from slurmtrain.slurm.requeue import release_held

    is_released = release_held(refused.job_id, refused.excluded, always=bool(refused.requeue_problem))
    if is_released:
        with workspace.journal(directory, "sync") as journal:
            event = JobRequeue(
                job_id=refused.job_id, restart=refused.restart, exclude=refused.excluded, why=refused.reason
            )
            journal.write(event)
        workspace.scheduler.forget()
    return is_released


def _refused_start(run: Run) -> Attempt | None:
    """The last start of the newest job that failed its preflight, if none has begun since."""
    for attempt in reversed(run.attempts):
        if run.newest is None or attempt.job_id != run.newest.job_id or attempt.submission != run.newest.submission:
            return None
        if attempt.excluded:
            return attempt
        if attempt.hosts:
            return None
    return None


def _open_runs(synced: Synced, only: Collection[str] | None) -> Sequence[tuple[str, Listed]]:
    """The runs that have not ended, ``only`` some: of thousands, few."""
    runs = synced.observed.runs
    return list(runs.fetch(_among(runs.worth_listing(0), only)).items())


def _among(run_ids: Collection[str], only: Collection[str] | None) -> Collection[str]:
    return run_ids if only is None else [run_id for run_id in run_ids if run_id in only]


def _mirror(workspace: Workspace, only: Collection[str] | None, synced: Synced) -> None:
    runs = synced.observed.runs
    outcome = mirror_runs(workspace, runs.fetch(_among(runs.behind(), only)))
    synced.mirrored += outcome.mirrored
    synced.problems += outcome.problems
    synced.notes += outcome.notes
    if outcome.mirrored:
        synced.observed = _again(workspace, outcome.mirrored, synced)


def _again(workspace: Workspace, run_ids: Collection[str], synced: Synced) -> Observed:
    """The runs as they are after an action; earlier findings stay reported."""
    return replace(synced.observed, runs=observe(workspace, run_ids, ask_slurm=False).runs)
