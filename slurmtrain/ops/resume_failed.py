"""Resuming all runs of a sweep that have failed: on Slurm with one job array for runs that request the same.

Each run is locked before it is looked at, and started as :mod:`slurmtrain.ops.shared.arrays.start_array` describes: if
this is killed, the started attempts are adopted, and the others are as they were, to be resumed by the same command.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurmtrain.errors import (
    NoCheckpoint,
    NotAvailable,
    PathError,
    RequestRefused,
    RunBusy,
    RunCancelled,
    SlurmtrainError,
    SubmitFailed,
    UserError,
)
from slurmtrain.model.query.folding import count_states
from slurmtrain.model.run.events.command import CancelRequested
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.resume import EXIT_S, check_checkpoint, dependents_to_resume, wait_for_exits
from slurmtrain.ops.shared.arrays.groups import groups_of
from slurmtrain.ops.shared.arrays.start_array import Element, start_array
from slurmtrain.ops.shared.arrays.sweep_limits import SweepLimit, turn_of
from slurmtrain.ops.shared.chain.alone import claim_name
from slurmtrain.ops.shared.chain.ending import upstream_problem
from slurmtrain.ops.shared.current_plan import after_oom_overrides, current_plan, last_fresh_start, predecessor
from slurmtrain.ops.shared.find import choose_all, refuse_others
from slurmtrain.ops.shared.mirroring.targets import check_trackers
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.start import NewAttempt, cancels, check_executor, secret_values, start
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.file_limit import make_room
from slurmtrain.slurm.command import read_options
from slurmtrain.specfile import replan
from slurmtrain.system.locks import locked

_FAILED = ("failed", "lost")


@dataclass(frozen=True, slots=True)
class Resumed:
    """The ids of runs that were started again, notes for the user, and why others were not started, a line each."""

    run_ids: Sequence[str]
    notes: Sequence[str]
    problems: Sequence[str] = ()


def find_failed(workspace: Workspace, names: Sequence[str], *, cancelled: bool = False) -> list[str]:
    """The ids of the runs that have failed or are lost.

    Args:
        workspace: where the runs are.
        names: sweeps, patterns, and names of runs.
        cancelled: also runs that a person has cancelled; not runs that a search has pruned.

    Raises:
        RunNotFound: a name refers to no run.
        RunBusy: none of the runs has failed.
    """
    observed = observe(workspace)
    refuse_others(workspace, observed, names)
    runs = observed.runs.fetch(choose_all(observed.runs.index, names))
    states = (*_FAILED, "cancelled") if cancelled else _FAILED
    pruned = _pruned(
        workspace, [run_id for run_id, listed in runs.items() if cancelled and listed.state == "cancelled"]
    )
    failed = [run_id for run_id, listed in runs.items() if listed.state in states and run_id not in pruned]
    if not failed:
        counts = count_states([listed.state for listed in runs.values()])
        raise RunBusy(f"none of the runs of {', '.join(names)} has failed: {counts}")
    return failed


def _pruned(workspace: Workspace, run_ids: Sequence[str]) -> set[str]:
    """The cancelled runs among these that a search has ended."""
    ends = workspace.store.events_of(run_ids, CancelRequested) if run_ids else {}
    return {run_id for run_id, events in ends.items() if any(event.payload.reason for event in events)}


def resume_failed(workspace: Workspace, run_ids: Sequence[str], overrides: Sequence[str] = ()) -> Resumed:
    """Start the next attempt of each of these runs, from its newest complete checkpoint; without one, it begins again.

    A run that cannot be started is left as it is, and keeps no other from being started.

    Args:
        workspace: where the runs are.
        run_ids: the runs, as :func:`find_failed` has them.
        overrides: ``KEY=VALUE``, for this attempt and all later ones.

    Raises:
        UserError: an override is wrong, or a secret's value is missing; nothing was started.
        RunBusy: other commands are at work on all of them.
        LaunchError, RequestRefused: as :func:`slurmtrain.ops.shared.start.start`; nothing was started.
        SubmitFailed: the job of some runs could not be submitted, or no run can be started; it names the submitted
            ones.
    """
    make_room(len(run_ids))
    with contextlib.ExitStack() as locks:
        notes: list[str] = []
        problems: list[str] = []
        elements = _elements(workspace, run_ids, overrides, locks, (notes, problems))
        if not elements and problems:
            raise SubmitFailed("; ".join([*problems, *notes]), [])
        if not elements:
            raise RunBusy("; ".join(notes))
        resumed = _start_all(workspace, elements, notes, problems)
    return replace(resumed, notes=[*resumed.notes, *dependents_to_resume(workspace, resumed.run_ids)])


def _elements(
    workspace: Workspace,
    run_ids: Sequence[str],
    overrides: Sequence[str],
    locks: contextlib.ExitStack,
    messages: tuple[list[str], list[str]],
) -> list[Element]:
    """What to start: the next attempt of each run that can be locked, and is still over.

    Args:
        workspace: where they are.
        run_ids: the runs.
        overrides: of all of them.
        locks: receives their locks.
        messages: receives notes on what is left out, and problems of runs that cannot be started.
    """
    notes, problems = messages
    held: dict[RunDir, tuple[int, frozenset[str]]] = {}
    for run_id in run_ids:
        directory = workspace.root.run(run_id)
        lock = locks.enter_context(locked(directory.lock, wait=False)) if directory.path.exists() else None
        if lock is None:
            notes.append(f"run {run_id}: another command is at work on it; left as it is")
        else:
            held[directory] = lock, cancels(directory)
    # Again, now that nothing else starts them.
    observe(workspace, [directory.id for directory in held], ask_slurm=False)
    runs = workspace.store.load_all([directory.id for directory in held])
    elements, fresh, names = [], [], dict[str, str]()
    deadline = time.monotonic() + EXIT_S
    for directory, (lock, earlier) in held.items():
        run = runs.get(directory.id)
        if run is None or run.unreadable or not run.ended or run.deleted_at is not None:
            notes.append(f"run {directory.id} is not one to resume any more; left as it is")
            continue
        if problem := upstream_problem(workspace, directory):
            notes.append(f"run {directory.id} cannot start: {problem}; left as it is")
            continue
        try:
            attempt = _next_attempt(workspace, directory, run, overrides, deadline)
            claim_name(workspace, attempt.plan.spec, run.id, locks, names)
            if not _has_checkpoint(directory, run, attempt):
                fresh.append(run.id)
        except (PathError, RunBusy, NotAvailable) as error:
            problems.append(_problem([run.id], error))
            continue
        elements.append(Element(directory, lock, replace(attempt, cancels=earlier)))
    elements = _startable(workspace, elements, problems)
    check_trackers(each.attempt.plan for each in elements)
    if fresh:
        notes.append(f"{len(fresh)} without a checkpoint begin again: {_some(fresh)}")
    return elements


def _problem(run_ids: Sequence[str], error: SlurmtrainError) -> str:
    return f"run {_some(run_ids)} cannot be started again: {error}"


def _startable(workspace: Workspace, elements: Sequence[Element], problems: list[str]) -> list[Element]:
    """The elements that their executor can start, in the same order. Raises LaunchError if Slurm does not answer.

    Args:
        workspace: provides the scheduler to ask.
        elements: the attempts to start.
        problems: receives why others cannot be.
    """
    refused: set[RunDir] = set()
    for executor in sorted({each.attempt.executor for each in elements}):
        members = [each for each in elements if each.attempt.executor == executor]
        try:
            check_executor(workspace, executor, [each.attempt.plan for each in members])
        except (NotAvailable, RequestRefused):
            for each in members:
                try:
                    check_executor(workspace, executor, [each.attempt.plan])
                except (NotAvailable, RequestRefused) as error:
                    problems.append(_problem([each.run.id], error))
                    refused.add(each.run)
    return [each for each in elements if each.run not in refused]


def _next_attempt(
    workspace: Workspace, directory: RunDir, run: Run, overrides: Sequence[str], deadline: float
) -> NewAttempt:
    """The attempt after the newest of a run.

    Args:
        workspace: where the run is.
        directory: its directory.
        run: what is known of it.
        overrides: the user's.
        deadline: until when its processes may take to exit, by the monotonic clock.

    Raises:
        UserError: an override is wrong, or a secret's value is missing.
        PathError: its plan cannot be read.
        RunBusy: processes of its newest attempt do not end.
    """
    after_oom = after_oom_overrides(run, overrides)
    planned = replan(current_plan(directory, run), [*after_oom, *overrides], read_options)
    wait_for_exits(run, deadline)
    return NewAttempt(
        plan=planned.plan,
        executor=run.executor,
        number=len(run.attempts) + 1,
        secrets=secret_values(planned.plan, planned.secrets),
        overrides=planned.overrides,
        turn=turn_of(workspace, run),
        since=last_fresh_start(run),
        predecessor=predecessor(directory, run),
    )


def _has_checkpoint(directory: RunDir, run: Run, attempt: NewAttempt) -> bool:
    try:
        check_checkpoint(directory, run, attempt.plan)
    except NoCheckpoint:
        return False
    return True


def _start_all(workspace: Workspace, elements: Sequence[Element], notes: list[str], problems: list[str]) -> Resumed:
    """Start attempts, each by itself if its run's last job is about to end: a job waits for one of the same name.

    Args:
        workspace: where they are.
        elements: what to start.
        notes: what the user is to know.
        problems: why other runs are not started.

    Raises:
        LaunchError, RequestRefused: nothing was started.
        SubmitFailed: Slurm did not take the jobs of some, and was not asked for the jobs after them.
    """
    alone: list[Element] = []
    together: list[Element] = []
    for each in elements:
        by_itself = each.attempt.executor != "slurm" or _has_job(workspace, each)
        (alone if by_itself else together).append(each)
    run_ids: list[str] = []
    failure: SlurmtrainError | None = None
    for group, limit in [*groups_of(workspace, together), *(([each], SweepLimit()) for each in alone)]:
        try:
            notes += _start(workspace, group, limit)
        except RunCancelled as error:
            notes.append(str(error))
        except UserError as error:
            failure = failure or error
            problems.append(_problem([each.run.id for each in group], error))
            continue
        except SlurmtrainError as error:
            if not run_ids:
                raise
            why = f"{error}; started again: {_some(run_ids)}; the others are as they were"
            raise SubmitFailed(why, run_ids) from error
        run_ids.extend(each.run.id for each in group)
    if failure is not None and not run_ids and len(problems) == 1:
        raise failure
    if not run_ids and problems:
        raise SubmitFailed("; ".join([*problems, *notes]), [])
    return Resumed(sorted(run_ids), notes, problems)


def _has_job(workspace: Workspace, element: Element) -> bool:
    """Whether the last job of a run is still in Slurm's queue, or nobody can say."""
    before = element.attempt.predecessor
    queue = workspace.scheduler.queue()
    job = queue.job(before.path.name.rpartition(".")[0]) if before is not None else None
    return not queue.answered or (job is not None and not is_final(job.state))


def _start(workspace: Workspace, group: Sequence[Element], limit: SweepLimit) -> list[str]:
    if len(group) > 1:
        return start_array(workspace, group, command="resume", at_once=limit.parallel, pack=limit.pack)
    [only] = group
    return start(workspace, only.run, only.lock, only.attempt, command="resume")


def _some(run_ids: Sequence[str]) -> str:
    """Ids, of very many the first."""
    return ", ".join(run_ids[:5]) + (f" and {len(run_ids) - 5} more" if len(run_ids) > 5 else "")
