"""Resuming: a new attempt of the same run, from its newest complete checkpoint.

Of a sweep, all runs that have failed: on Slurm with one job array for runs that request the same. Each run is locked
before it is looked at, and started as :mod:`slurmtrain.ops.shared.start` describes: if this is killed, the started
attempts are adopted, and the others are as they were, to be resumed by the same command.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.errors import (
    CheckpointError,
    LockHeld,
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
from slurmtrain.model.experiment.checkpoint import OWN
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.query.comparison import count_states
from slurmtrain.model.run.events.checkpoint_events import CheckpointPruned
from slurmtrain.model.run.events.command_events import CancelRequested
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RunDir, checkpoint_step
from slurmtrain.model.run.lineage import EARLY, UPSTREAM
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.find import choose_all, find
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.next_attempts import (
    HeldRun,
    NewAttempt,
    SweepLimit,
    after_oom_overrides,
    cancels,
    check_executor,
    current_plan,
    hold,
    last_fresh_start,
    next_attempt,
)
from slurmtrain.ops.shared.observe import observe, observe_run
from slurmtrain.ops.shared.shared_jobs import group_attempts
from slurmtrain.ops.shared.start import start
from slurmtrain.ops.shared.start_order import claim_name, dependents, observe_upstreams, upstream_problem
from slurmtrain.ops.shared.trackers import check_trackers
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.code_snapshots import with_code_of_now
from slurmtrain.runtime.environment.process_limits import make_room
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import replan
from slurmtrain.system.files import make_directory
from slurmtrain.system.locks import locked

# How many seconds the processes of an ended attempt may take to exit.
_EXIT_S = 10.0
# How many runs notes name.
_NAMED = 5
_FAILED = ("failed", "lost")


def resume(
    workspace: Workspace,
    name: str,
    overrides: Sequence[str] = (),
    *,
    from_start: bool = False,
    step: int | None = None,
    code_of_now: bool = False,
) -> tuple[str, list[str]]:
    """Start the next attempt of a run; returns the run's id, and notes for the user.

    Args:
        workspace: where the run is.
        name: its id, a prefix of the id, its name, or ``@last``.
        overrides: ``KEY=VALUE``, for this attempt and all later ones.
        from_start: move the run's checkpoints aside and begin again.
        step: go on from the checkpoint of this step, and move later ones aside; None: from the newest.
        code_of_now: execute the code as it is now, and not as it was when the run was submitted.

    Raises:
        RunBusy: the run is active.
        NoCheckpoint: its checkpoints cannot be continued from; without any, it begins again, as a note says.
        NotAvailable: with ``step``, its script writes its checkpoints itself.
        UserError: an override is wrong, or a secret's value is missing.
        LaunchError, RequestRefused: as :func:`slurmtrain.ops.shared.start.start`.
    """
    [run_id], _ = find(workspace, [name])
    directory = workspace.root.run(run_id)
    # Not waited for: the holder is about to start the run, or to end it, and this would be a second start.
    with contextlib.ExitStack() as locks:
        try:
            lock = locks.enter_context(locked(directory.lock, limit_s=0.0))
        except LockHeld as error:
            raise RunBusy(
                f"another command is working on run {run_id}: its lock is {error.holder}; try again in a moment"
            ) from error
        assert lock is not None
        held = HeldRun(directory, lock, cancels(directory))
        run = observe_run(workspace, run_id, ask_slurm=True)
        observe_upstreams(workspace, directory)
        _check_resumable(workspace, run, step, changes=bool(overrides) or from_start)
        attempt = _next_attempt(workspace, held, run, overrides, time.monotonic() + _EXIT_S)
        attempt = replace(attempt, from_start=from_start)
        notes = [f"run {run_id} has no checkpoint, so it starts from the beginning"] * _check_next(
            workspace, run, attempt, locks
        )
        if code_of_now:
            newer, more = with_code_of_now(workspace, directory, attempt.plan)
            notes += more
            attempt = replace(attempt, plan=newer)
        # After everything that can be checked first: a refused resume must leave the checkpoints where they are.
        if from_start or step is not None:
            _put_aside(workspace, directory, run, step)
        notes += start(workspace, [attempt], command="resume")
    return run_id, [*notes, *_dependents_to_resume(workspace, [run_id])]


def _check_resumable(workspace: Workspace, run: Run, step: int | None, *, changes: bool) -> None:
    """Check that a run can go on: from a ``step``, if there is one; ``changes``: the user asks for something else.

    Raises RunBusy; NoCheckpoint if there is no checkpoint of the step, or a damaged one; NotAvailable.
    """
    if not run.idle and run.attempts:
        raise RunBusy(f"run {run.id} is {run.state}; wait for it, or end it with 'slurmtrain cancel {run.id}'")
    if run.deleted_at is not None:
        raise RunBusy(f"the files of run {run.id} were deleted; 'slurmtrain submit' starts a new run")
    if run.state == "completed" and not changes and step is None:
        raise RunBusy(
            f"run {run.id} has completed; to train it further, give it more steps, for example 'slurmtrain resume "
            f"{run.id} params.steps=...'"
        )
    if step is None:
        return
    from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints, refuse_external
    from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest, relative_path, verify_files

    again = f"move those after step {step} away, then 'slurmtrain resume {run.id}'"
    refuse_external(workspace.root.run(run.id), run, again)
    [chosen] = choose_checkpoints(workspace, run, step, to="continue from")
    bad = {each.path for each in run.on_disk if not each.complete}
    problem = "'slurmtrain verify' found it damaged" if relative_path(chosen) in bad else ""
    try:
        # Only sizes: ranks compare the hashes.
        manifest = read_manifest(chosen)
        verify_files(chosen, manifest, manifest.files, hashes=False)
    except CheckpointError as error:
        problem = problem or str(error)
    if problem:
        raise NoCheckpoint(f"run {run.id} cannot continue from step {step}: {problem}")


def _next_attempt(
    workspace: Workspace, held: HeldRun, run: Run, overrides: Sequence[str], deadline: float
) -> NewAttempt:
    """The attempt after the newest of a run.

    Args:
        workspace: where the run is.
        held: the run.
        run: what is known of it.
        overrides: the user's.
        deadline: until when its processes may take to exit, by the monotonic clock.

    Raises:
        UserError: an override is wrong, or a secret's value is missing.
        PathError: its plan cannot be read.
        RunBusy: processes of its newest attempt do not end.
    """
    after_oom = after_oom_overrides(run, overrides)
    planned = replan(current_plan(held.directory, run), [*after_oom, *overrides], read_options)
    # An attempt journals its end a moment before its processes exit.
    while alive(run):
        if time.monotonic() > deadline:
            raise RunBusy(
                f"processes of the last attempt of run {run.id} still run; 'slurmtrain cancel {run.id}' ends them"
            )
        time.sleep(0.05)
    return next_attempt(workspace, held, run, planned)


def _check_next(workspace: Workspace, run: Run, attempt: NewAttempt, locks: contextlib.ExitStack) -> bool:
    """Check that an attempt can start, and whether it begins again for want of a checkpoint.

    ``locks`` gets the lock of its name. Raises as :func:`resume`.
    """
    directory, plan = attempt.run, attempt.plan
    if problem := upstream_problem(workspace, directory):
        raise UserError(f"{problem}; 'slurmtrain resume' that run first, then this one")
    claim_name(workspace, plan.spec, run.id, locks)
    # A run that still waited for others has not begun, whatever ended it.
    has_begun = directory.upstream_facts.exists() or not directory.upstreams.exists()
    trained = has_begun and any(attempt.cause not in (EARLY, UPSTREAM) for attempt in run.attempts)
    begins_again = not attempt.from_start and trained and is_without_checkpoint(directory, run, plan)
    check_executor(workspace, run.executor, [plan])
    check_trackers([plan])
    if not attempt.from_start or plan.spec.checkpoint.format != OWN:
        return begins_again
    from slurmtrain.runtime.checkpoint.external import Search, find_checkpoints

    # Checkpoints in the run's own directory are put aside.
    paths = (each.path for each in find_checkpoints(Search.from_plan(plan, directory)))
    if outside := next((path for path in paths if not path.is_relative_to(directory.checkpoints)), None):
        raise UserError(
            f"the script of run {run.id} finds its checkpoints itself ('checkpoint.format: own') and would continue "
            f"from {outside}; move the files that match {plan.spec.checkpoint.glob!r} away, then start over"
        )
    return begins_again


def _dependents_to_resume(workspace: Workspace, run_ids: Collection[str]) -> list[str]:
    """Notes on runs that ended because one of these had failed: a person decides whether they are still wanted."""
    waiting = [run_id for run_id in dependents(workspace, run_ids) if run_id not in run_ids]
    ended = [run for run in workspace.store.load_all(waiting).values() if run.newest and run.newest.cause == UPSTREAM]
    notes = [
        f"run {run.id} ({run.name}) had ended because of it; resume it too: 'slurmtrain resume {run.id}'"
        for run in ended
    ]
    return [*notes[:_NAMED], f"and {len(notes) - _NAMED} more"] if len(notes) > _NAMED else notes


def is_without_checkpoint(directory: RunDir, run: Run, plan: Plan) -> bool:
    """Whether a run that has not completed has no checkpoint, so that its next attempt begins again.

    Args:
        directory: the run's directory.
        run: the run's state.
        plan: the plan of its next attempt.

    Raises:
        NoCheckpoint: there is nothing that a completed run could go on from, or only what is damaged or incomplete,
            which nobody gives up unasked.
    """
    again = f"'slurmtrain resume --from-start {run.id}' starts from the beginning, 'slurmtrain submit' starts a new run"
    pattern = plan.spec.checkpoint.glob
    if pattern is not None:
        from slurmtrain.runtime.checkpoint.external import Search, find_checkpoints

        matches = find_checkpoints(Search.from_plan(plan, directory, last_fresh_start(run)))
        if any(each.complete for each in matches) or any(directory.start.glob("*")):
            return False
        if matches or run.state == "completed":
            newest = f" (of {matches[0].path.name}, {matches[0].problem})" if matches else ""
            raise NoCheckpoint(f"run {run.id} has no complete checkpoint that matches {pattern!r}{newest}; {again}")
        return True
    from slurmtrain.runtime.checkpoint.checkpoint_files import damaged, newest_published, start_point, sweep

    # A complete one counts even if its publisher was killed before the rename: the sweep renames it.
    sweep(directory.checkpoints, attempt="")
    if newest_published(directory.checkpoints) is not None or start_point(directory) is not None:
        return False
    bad = damaged(directory.checkpoints)
    if bad or run.state == "completed":
        why = f", {len(bad)} damaged" if bad else ""
        raise NoCheckpoint(f"run {run.id} has no checkpoint to continue from{why}; {again}")
    return True


def _put_aside(workspace: Workspace, directory: RunDir, run: Run, step: int | None) -> None:
    """Move checkpoints aside that the next attempt must not find: what is later than a ``step``; None: all.

    Call it once no process of the run is left, and :func:`is_without_checkpoint` has published what was complete: a
    checkpoint whose publisher was killed before the rename is a later one, too.
    """
    from slurmtrain.runtime.checkpoint.checkpoint_files import published, relative_path

    aside = directory.path / f"checkpoints.before-attempt-{len(run.attempts) + 1}"
    if step is None:
        moved = {each.path: each.step for each in run.on_disk} if any(directory.checkpoints.glob("*")) else None
        why = "the run starts over"
    else:
        later = [path for path in published(directory.checkpoints) if (checkpoint_step(path.name) or 0) > step]
        moved = {relative_path(path): checkpoint_step(path.name) for path in later} or None
        why = f"the run continues from step {step}"
    if moved is None:
        return
    # Before anything is journaled: the rename could fail, with the checkpoints already noted as gone.
    if step is None and aside.exists():
        raise UserError(f"{aside} exists already; move it away and try again")
    # Journaled first, and the newest moved first: if this is killed in between, the run goes on from the newest one
    # then, and the next observation of the disk reverts the events of checkpoints that were not moved.
    with workspace.journal(directory, "resume") as journal:
        for path, of_step in moved.items():
            journal.write(CheckpointPruned(path=path, step=of_step, why=why))
    if step is None:
        directory.checkpoints.rename(aside)
        make_directory(directory.checkpoints, private=True)
        return
    make_directory(aside, private=True)
    for path in moved:
        (directory.path / path).rename(aside / Path(path).name)


# --- all that have failed --------------------------------------------------------------------------------------------


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
    runs = observed.runs.fetch(choose_all(workspace, observed.runs, names))
    states = (*_FAILED, "cancelled") if cancelled else _FAILED
    ended = [run_id for run_id, listed in runs.items() if cancelled and listed.state == "cancelled"]
    cancels_of = workspace.store.events_of(ended, CancelRequested) if ended else {}
    pruned = {run_id for run_id, events in cancels_of.items() if any(event.payload.prunes for event in events)}
    failed = [run_id for run_id, listed in runs.items() if listed.state in states and run_id not in pruned]
    if not failed:
        counts = count_states([listed.state for listed in runs.values()])
        also = "; --cancelled takes what was cancelled, too" if not cancelled and "cancelled" in counts else ""
        raise RunBusy(f"none of the runs of {', '.join(names)} has failed: {counts}{also}")
    return failed


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
    # Each lock is an open file, and a shell often allows 1024 of them.
    make_room(len(run_ids))
    with contextlib.ExitStack() as locks:
        starting = _Restarts(workspace)
        attempts = starting.plan(run_ids, overrides, locks)
        if not attempts and starting.problems:
            raise SubmitFailed("; ".join([*starting.problems, *starting.notes]), [])
        if not attempts:
            raise RunBusy("; ".join(starting.notes))
        started = starting.start(attempts)
    notes = [*starting.notes, *_dependents_to_resume(workspace, started)]
    return Resumed(sorted(started), notes, starting.problems)


class _Restarts:
    """The next attempts of several runs. ``notes``: for the user; ``problems``: why runs are not started."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.notes: list[str] = []
        self.problems: list[str] = []

    def plan(self, run_ids: Sequence[str], overrides: Sequence[str], locks: contextlib.ExitStack) -> list[NewAttempt]:
        """The next attempt of each run that can be locked, is still over, and can be started.

        Args:
            run_ids: the runs.
            overrides: of all of them.
            locks: receives their locks.
        """
        workspace = self._workspace
        held: list[HeldRun] = []
        for run_id in run_ids:
            directory = workspace.root.run(run_id)
            if directory.path.exists() and (own := hold(directory, locks)) is not None:
                held.append(own)
            else:
                self.notes.append(f"run {run_id} was left alone: another command is working on it")
        # Again, now that nothing else starts them.
        observe(workspace, [each.id for each in held], ask_slurm=False)
        runs = workspace.store.load_all([each.id for each in held])
        attempts, fresh, names = [], [], dict[str, str]()
        deadline = time.monotonic() + _EXIT_S
        for each in held:
            run = runs.get(each.id)
            if run is None or run.unreadable or not run.ended or run.deleted_at is not None:
                self.notes.append(f"run {each.id} was left alone, because it can no longer be resumed")
                continue
            if problem := upstream_problem(workspace, each.directory):
                self.notes.append(f"run {each.id} cannot start: {problem}; left as it is")
                continue
            try:
                attempt = _next_attempt(workspace, each, run, overrides, deadline)
                claim_name(workspace, attempt.plan.spec, run.id, locks, names)
                if is_without_checkpoint(each.directory, run, attempt.plan):
                    fresh.append(run.id)
            except (NoCheckpoint, PathError, RunBusy, NotAvailable) as error:
                self._add_problem([run.id], error)
                continue
            attempts.append(attempt)
        attempts = self._startable(attempts)
        check_trackers(each.plan for each in attempts)
        if fresh:
            self.notes.append(f"{len(fresh)} without a checkpoint start from the beginning: {_first_of(fresh)}")
        return attempts

    def _add_problem(self, run_ids: Sequence[str], error: SlurmtrainError) -> None:
        self.problems.append(f"run {_first_of(run_ids)} cannot be started again: {error}")

    def _startable(self, attempts: Sequence[NewAttempt]) -> list[NewAttempt]:
        """The attempts that their executor can start. Raises LaunchError if Slurm does not answer."""
        refused: set[RunDir] = set()
        for executor in sorted({each.executor for each in attempts}):
            members = [each for each in attempts if each.executor == executor]
            try:
                check_executor(self._workspace, executor, [each.plan for each in members])
            except (NotAvailable, RequestRefused):
                # One by one only now: the error of all together does not say whose plan it is.
                for each in members:
                    try:
                        check_executor(self._workspace, executor, [each.plan])
                    except (NotAvailable, RequestRefused) as error:
                        self._add_problem([each.run.id], error)
                        refused.add(each.run)
        return [each for each in attempts if each.run not in refused]

    def start(self, attempts: Sequence[NewAttempt]) -> list[str]:
        """Start attempts; returns their runs.

        Each is started by itself if its run's last job is about to end: a job waits for one of the same name.

        Args:
            attempts: what to start.

        Raises:
            LaunchError, RequestRefused: nothing was started.
            SubmitFailed: Slurm did not take the jobs of some, and was not asked for the jobs after them.
        """
        alone: list[NewAttempt] = []
        together: list[NewAttempt] = []
        for each in attempts:
            if each.executor == "slurm":
                # The last job of the run is still in Slurm's queue, or nobody can say.
                before, queue = each.predecessor, self._workspace.scheduler.queue()
                job = queue.job(before.path.name.rpartition(".")[0]) if before is not None else None
                has_job = not queue.answered or (job is not None and not is_final(job.state))
            (alone if each.executor != "slurm" or has_job else together).append(each)
        groups = group_attempts(self._workspace, together)
        run_ids: list[str] = []
        failure: SlurmtrainError | None = None
        for group, limit in [*groups, *(([each], SweepLimit()) for each in alone)]:
            of_group = [each.run.id for each in group]
            try:
                self.notes += start(self._workspace, group, command="resume", at_once=limit.parallel, pack=limit.pack)
            except RunCancelled as error:
                self.notes.append(str(error))
            except UserError as error:
                failure = failure or error
                self._add_problem(of_group, error)
                continue
            except SlurmtrainError as error:
                if not run_ids:
                    raise
                why = f"{error}; started again: {_first_of(run_ids)}; the others are as they were"
                raise SubmitFailed(why, run_ids) from error
            run_ids.extend(of_group)
        if failure is not None and not run_ids and len(self.problems) == 1:
            raise failure
        if not run_ids and self.problems:
            raise SubmitFailed("; ".join([*self.problems, *self.notes]), [])
        return run_ids


def _first_of(run_ids: Sequence[str]) -> str:
    """Ids, of very many the first."""
    return ", ".join(run_ids[:_NAMED]) + (f" and {len(run_ids) - _NAMED} more" if len(run_ids) > _NAMED else "")
