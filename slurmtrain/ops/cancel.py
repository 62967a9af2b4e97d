"""Cancelling: ask runs to end, wait for them to save and exit, then kill what is left.

Runs whose cancellation cannot be journaled, as their directory was deleted or its disk is full, are ended without
reading anything of it. Their processes on this machine are known from the registry, from their command lines and from
the environment of ranks; their Slurm jobs from the registry and from their names, which end with the id.

Runs that have been idle for longer than their specs allow (``idle_after``) are cancelled in the same way.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmtrain.errors import LockHeld, PathError, RunBusy, RunNotFound, SlurmDown, UntrustedPath
from slurmtrain.model.diagnosis.node_load import Idle
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.run.events.command_events import CancelRequested
from slurmtrain.model.run.job_state import SUSPENDED, is_final
from slurmtrain.model.run.layout import RunDir, is_run_id
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.find import choose_all, refuse_others
from slurmtrain.ops.shared.local_jobs import alive, processes_of
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.node_use import idle_of
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.shared_jobs import is_needed_by_others, leave_job
from slurmtrain.ops.shared.slurm_jobs import live_jobs
from slurmtrain.ops.shared.start_order import dependents, end_blocked
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.lease import kill_leftovers
from slurmtrain.slurm.parse import second_job_name
from slurmtrain.slurm.slurm_commands import is_installed
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.locks import locked, print_notice
from slurmtrain.system.process import Process, descendants

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# Seconds that a run has to end by itself: longer than node agents give their ranks, so that killing is the exception.
PATIENCE_S = 45.0
_POLL_S = 0.1
# How long to wait for the recorded end of a run whose processes are gone.
_GONE_S = 2.0
# How many seconds to wait for a command that holds the run's lock: it may be stopped, or Slurm may not answer it.
_LOCK_S = 5.0
# How many seconds to wait for Slurm to end a cancelled job, if no agent journals an end, and how often to ask for that.
# A job that its agent has just requeued is cancelled when its last process has ended.
_KILL_TIMEOUT_S = 30.0
_KILL_POLL_S = 3.0
_DELETED = "its directory was deleted"
IDLE_AFTER = "idle_after"
"""The key of specs that says how long a run may be idle."""


def find_runs(workspace: Workspace, names: Sequence[str]) -> tuple[list[str], Observed]:
    """The ids of the runs to cancel, and the state of all runs by their journals.

    An id that the registry does not know is taken as it is: the run's directory may have been deleted while its job
    lives, and after a rebuild of the registry nothing but its job knows it.

    Args:
        workspace: where the runs are.
        names: names, sweeps and patterns, as :func:`slurmtrain.ops.shared.find.choose` takes them.

    Raises:
        RunNotFound: a name or pattern refers to no run, and is not an id; to a run of somebody else; or every run of a
            sweep has ended.
    """
    observed = observe(workspace, ask_slurm=False)
    refuse_others(workspace, observed.runs, names)
    chosen: dict[str, None] = {}
    for name in names:
        try:
            chosen |= dict.fromkeys(choose_all(workspace, observed.runs, [name], live=True))
        except RunNotFound:
            if not is_run_id(name) or any(row.sweep == name for row in observed.runs.named([name]).values()):
                raise
            chosen[name] = None
    return list(chosen), observed


def cancel(workspace: Workspace, run_ids: Sequence[str], *, force: bool = False) -> dict[str, Run]:
    """End runs, from any terminal of the machine or cluster that they run on; returns their final state.

    Ended and unreadable runs are left unchanged. The request is journaled first: if this is killed, ``sync`` finishes
    it. A run whose request cannot be journaled is ended all the same. Runs that wait for one of them to complete are
    ended too.

    Args:
        workspace: where the runs are.
        run_ids: the runs to end, possibly without a directory, or unknown to the registry.
        force: kill at once, without letting the runs save.

    Raises:
        RunBusy: a local run is on another machine; nothing was done.
        RunNotFound: there is no trace of a run.
        SlurmDown: scancel failed; ``sync`` tries again.
    """
    loaded = _load_runs(workspace, run_ids)
    unreadable = {run_id: run for run_id, run in loaded.items() if run.unreadable and not _is_deleted(workspace, run)}
    runs = {run_id: run for run_id, run in loaded.items() if run_id not in unreadable}
    for run in runs.values():
        # Of an attempt that has ended nothing is left, wherever it was.
        over = run.ended or (run.newest is not None and run.newest.ended)
        if not over and run.executor == "local" and alive(run) is None:
            hosts = ", ".join(sorted({process.host for process in _processes(run)}))
            raise RunBusy(f"run {run.id} is on {hosts}, whose processes cannot be reached from here; cancel it there")
    unrecorded = {run_id: _DELETED for run_id in run_ids if run_id not in loaded}
    for run in runs.values():
        # A rank that ignores signals may outlive its attempt, and its children may outlive a killed agent.
        if run.ended:
            _kill_trees(_processes(run))
        elif why := _request(workspace, run.id):
            unrecorded[run.id] = why
    ended = unreadable | end_unrecorded(
        workspace, {run_id: runs.get(run_id) for run_id in unrecorded}, unrecorded, force=force
    )
    ended |= finish_cancel(workspace, [run_id for run_id in run_ids if run_id not in ended], force=force)
    # Last: by now the registry knows what became of these.
    end_blocked(workspace, dependents(workspace, run_ids))
    return {run_id: ended[run_id] for run_id in run_ids}


def finish_cancel(workspace: Workspace, run_ids: Sequence[str], *, force: bool = False) -> dict[str, Run]:
    """End runs whose cancellation was requested: ask first, then kill runs that have not ended in time.

    Args:
        workspace: where the runs are.
        run_ids: the runs.
        force: kill at once.
    """
    deleted = {run_id: run for run_id, run in _load_runs(workspace, run_ids).items() if _is_deleted(workspace, run)}
    runs = end_unrecorded(workspace, deleted, dict.fromkeys(deleted, _DELETED), force=force)
    runs |= _end(workspace, [run_id for run_id in run_ids if run_id not in deleted], force=force)
    # What agents that were killed themselves could not end. On a cluster Slurm does that.
    for run in _local(runs.values()):
        kill_leftovers(workspace.root.run(run.id))
    return runs


def _end(workspace: Workspace, run_ids: Sequence[str], *, force: bool) -> dict[str, Run]:
    """Ask runs to end, wait for that, and kill the ones that have not ended in time."""
    runs = _load_runs(workspace, run_ids)
    under_way = [run for run in runs.values() if not run.ended]
    for run in under_way:
        # If the job is started again nevertheless, its agents see that the run is over, and end at once. A full disk
        # only takes this precaution away, and agents also end if they cannot read the lease.
        with suppress(OSError, PathError):
            lease.close(workspace.root.run(run.id), None, "cancelled")
    for run in _local(under_way):
        # The first process is submitit's controller, which passes the signal to starting agents.
        for process in _processes(run):
            process.send(signal.SIGTERM)
    _ask_slurm(workspace, under_way, force=force)
    jobs = []
    for run in under_way:
        if run.newest is not None and run.newest.handed_over:
            jobs.append(run.id)
            continue
        # Another command with the lock is just submitting it: a job that does not exist yet will not end meanwhile.
        with locked(workspace.root.run(run.id).lock, wait=False) as lock:
            if lock is not None:
                jobs.append(run.id)
    if not jobs:
        return runs
    waited = _wait(workspace, jobs, until=time.monotonic() + (0.0 if force else PATIENCE_S))
    while any(alive(run) for run in _local(waited.values())):
        _kill_trees(process for run in _local(waited.values()) for process in _processes(run))
        # Again: a rank may have started another process after its descendants were listed and before it ended.
        waited = _wait(workspace, jobs, until=time.monotonic() + 1.0)
    # Only Slurm knows the end of a job without agents.
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while any(not run.ended and run.executor != "local" for run in waited.values()):
        waited = _load_runs(workspace, jobs, ask_slurm=True)
        if time.monotonic() >= deadline or all(run.ended for run in waited.values()):
            break
        time.sleep(_KILL_POLL_S)
        workspace.scheduler.forget()
    return {**runs, **waited}


def _load_runs(workspace: Workspace, run_ids: Collection[str], *, ask_slurm: bool = False) -> dict[str, Run]:
    observe(workspace, run_ids, ask_slurm=ask_slurm)
    loaded = workspace.store.load_all(run_ids)
    return {run_id: loaded[run_id] for run_id in run_ids if run_id in loaded}


def _is_deleted(workspace: Workspace, run: Run) -> bool:
    path = workspace.root.run(run.id).path
    return not (run.ended or path.is_symlink() or path.exists())


def _request(workspace: Workspace, run_id: str) -> str:
    """Journal that the run is to end; returns why that is not possible, as a phrase, else nothing.

    Raises UntrustedPath if the run is somebody else's.
    """
    if not workspace.root.run(run_id).path.exists():
        return _DELETED
    try:
        request_end(workspace, run_id)
    except UntrustedPath:
        raise
    except (OSError, PathError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        return (
            f"the cancellation could not be recorded ({why}): cancel it again once that is fixed, or 'slurmtrain "
            "sync' will take it for an interrupted run"
        )
    return ""


def request_end(workspace: Workspace, run_id: str, reason: str | None = None, by: str | None = None) -> None:
    """Journal that a run is to end, as a person does who cancels it.

    Args:
        workspace: where the run is.
        run_id: the run.
        reason: why, as a phrase, if no person asks for it.
        by: the key of the spec that has it ended; None: a person or a search does.

    Raises:
        PathError: that cannot be journaled.
        OSError: likewise.
    """
    directory = workspace.root.run(run_id)
    with ExitStack() as locks:
        try:
            locks.enter_context(locked(directory.lock, limit_s=_LOCK_S))
        except LockHeld as error:
            # Whoever has it is starting the run, and carries out a request that it finds in the run's journals.
            print_notice(
                f"run {run_id} is being started by another command: its lock is {error.holder}. The request is "
                "recorded, and that command will end the job as soon as it continues; if it never does, end that "
                "command and call 'slurmtrain sync'"
            )
        # Under the lock, after reading the run again: one that has just ended by itself must not count as cancelled.
        if not _load_runs(workspace, [run_id])[run_id].ended:
            with workspace.journal(directory, "cancel") as journal:
                journal.write(CancelRequested(reason=reason, by=by))


def _local(runs: Collection[Run]) -> list[Run]:
    return [run for run in runs if run.executor == "local"]


def _processes(run: Run) -> list[Process]:
    return [Process.from_dict(process) for process in run.newest.processes] if run.newest else []


def _kill_trees(processes: Iterable[Process]) -> None:
    for process in processes:
        # The descendants are listed before anything is killed: orphans could no longer be traced to the run.
        for each in [process, *descendants(process)]:
            each.send(signal.SIGKILL)


def _ask_slurm(workspace: Workspace, runs: Sequence[Run], *, force: bool) -> None:
    job_ids: list[str] = []
    second: list[str] = []
    for run in runs:
        if run.executor != "slurm" or run.newest is None or not run.newest.job_id:
            continue
        if is_needed_by_others(workspace, run):
            leave_job(workspace, workspace.root.run(run.id), run)
        else:
            job_ids.append(run.newest.job_id)
            if run.resources.get("grow"):
                second.append(second_job_name(run.name, run.id))
    if not job_ids:
        return
    try:
        workspace.scheduler.cancel(job_ids, force=force)
        if second:
            # The run's node 0 does it too, if it lives.
            workspace.scheduler.cancel_named(second)
    except SlurmDown as error:
        raise SlurmDown(f"{error}; the request is recorded, and 'slurmtrain sync' will carry it out") from error


def _wait(workspace: Workspace, run_ids: Sequence[str], *, until: float) -> dict[str, Run]:
    """Wait, by the journals alone, until active runs have ended and their processes are gone. Slurm is asked later."""
    while True:
        runs = _load_runs(workspace, run_ids)
        active = [
            run
            for run in runs.values()
            if (run.executor == "local" and (not run.ended or alive(run) is True))
            or (run.executor != "local" and not run.ended and run.newest and run.newest.hosts and not run.newest.ended)
        ]
        if time.monotonic() >= until or not active:
            return runs
        if all(run.executor == "local" and alive(run) is False for run in active):
            # Their end is about to be observed, unless the disk is too full to record it.
            until = min(until, time.monotonic() + _GONE_S)
        time.sleep(_POLL_S)


# --- runs that cannot be written to ----------------------------------------------------------------------------------


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
    live = _end_jobs(workspace, {run_id: runs[run_id] for run_id in on_slurm}, force=force)
    outcomes = {}
    for run_id, run in runs.items():
        jobs = live.get(run_id, ())
        before = run or Run(id=run_id, name="", state="running", reason="", executor="slurm" if jobs else "local")
        reason = f"its job was ended; {why[run_id]}"
        if jobs:
            reason = f"job {', '.join(jobs)} was cancelled, but has not ended yet; {why[run_id]}"
        outcomes[run_id] = replace(before, state=before.state if jobs else "cancelled", reason=reason)
    # For runs without a directory no journal will ever say that they have ended.
    deleted = [run_id for run_id, run in outcomes.items() if run.ended and not workspace.root.run(run_id).path.exists()]
    if deleted:
        now = time.time()
        workspace.store.write(lambda transaction: transaction.set_cancelled(deleted, now))
    return outcomes


def _end_jobs(workspace: Workspace, runs: Mapping[str, Run | None], *, force: bool) -> dict[str, list[str]]:
    """Cancel the jobs of these runs, and wait for their ends; returns each run's jobs that have not ended.

    Raises RunNotFound, SlurmDown.
    """
    jobs: dict[str, list[str]] = {}
    # A run that is known to be on Slurm must not count as ended because this machine has no squeue.
    if runs and (is_installed("squeue") or any(runs.values())):
        jobs = {
            run_id: live_jobs(workspace, run_id, run)
            for run_id, run in runs.items()
            if run is None or not is_needed_by_others(workspace, run)
        }
        if ids := [job_id for of_run in jobs.values() for job_id in of_run]:
            workspace.scheduler.cancel(ids, force=force)
    for run_id, run in runs.items():
        if run is None and not jobs.get(run_id):
            raise RunNotFound(f"there is no run {run_id!r} here, and it has no job or process")
    deadline = time.monotonic() + PATIENCE_S
    while any(jobs.values()):
        queue = workspace.scheduler.queue()
        jobs = {
            run_id: [
                job_id
                for job_id in of_run
                if not queue.answered or ((job := queue.job(job_id)) is not None and not is_final(job.state))
            ]
            for run_id, of_run in jobs.items()
        }
        if not any(jobs.values()) or time.monotonic() > deadline:
            break
        time.sleep(_KILL_POLL_S)
        workspace.scheduler.forget()
    return jobs


def _end_processes(directory: RunDir, run: Run | None, *, force: bool) -> bool:
    """End the processes of a local run; returns whether there were any."""
    processes = processes_of(directory, run)
    if not force:
        for process in processes:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while any(process.alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    _kill_trees(processes)
    return bool(kill_leftovers(directory)) or bool(processes)


# --- idle runs --------------------------------------------------------------------------------------------------------


def end_idle(workspace: Workspace, runs: Mapping[str, Listed]) -> dict[str, str]:
    """End the runs among these that have been idle for too long, as ``cancel`` does; returns why, by id.

    Args:
        workspace: Where the runs are.
        runs: Runs that have not ended, as observed.

    Raises:
        SlurmtrainError, OSError: A request cannot be recorded, or Slurm does not answer.
    """
    ended: dict[str, str] = {}
    for run_id, listed in runs.items():
        is_suspended = listed.live is not None and listed.live.state == SUSPENDED
        if listed.state != "running" or is_suspended or listed.row["cancelled"]:
            continue
        # Before its plan is read: few runs are idle at all.
        idle = idle_of(workspace.root.run(run_id), listed.job_id, listed.resources)
        run = workspace.store.load(run_id) if idle is not None else None
        if idle is None or run is None or run.unreadable or (run.executor == "local" and not alive(run)):
            continue
        if why := _why_end(workspace, run, idle):
            request_end(workspace, run_id, why, IDLE_AFTER)
            ended[run_id] = why
    # After all requests, so that the runs end side by side.
    finish_cancel(workspace, list(ended))
    return ended


def _why_end(workspace: Workspace, run: Run, idle: Idle) -> str:
    """Why an idle run is to end, as a phrase; empty: it may go on."""
    with suppress(PathError):
        limit_s, idle_s = current_plan(workspace.root.run(run.id), run).spec.idle_after, time.time() - idle.since
        if limit_s is not None and idle_s >= limit_s:
            verb = "were idle" if idle.gpus > 1 else "was idle" if idle.gpus else "computed nothing"
            return f"{idle.subject} {verb} for {format_span(idle_s)} ({IDLE_AFTER}: {format_span(limit_s)})"
    return ""
