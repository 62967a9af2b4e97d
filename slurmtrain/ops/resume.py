"""Resuming: a new attempt of the same run, from its newest complete checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurmtrain.errors import LockHeld, NoCheckpoint, RunBusy, UserError
from slurmtrain.model.run.chain.upstreams import EARLY, UPSTREAM
from slurmtrain.model.run.events.checkpoint import CheckpointPruned
from slurmtrain.model.run.files.checkpoint_names import checkpoint_step
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.checkpoint import OWN
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.arrays.sweep_limits import turn_of
from slurmtrain.ops.shared.chain.alone import claim_name
from slurmtrain.ops.shared.chain.ending import dependents, observe_upstreams, upstream_problem
from slurmtrain.ops.shared.current_plan import after_oom_overrides, current_plan, last_fresh_start, predecessor
from slurmtrain.ops.shared.find import find
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.mirroring.targets import check_trackers
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.start import NewAttempt, cancels, check_executor, secret_values, start
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.code import with_code_of_now
from slurmtrain.slurm.command import read_options
from slurmtrain.specfile import PlannedRun, replan
from slurmtrain.system.files import make_directory
from slurmtrain.system.locks import locked

# How many seconds the processes of an ended attempt may take to exit.
EXIT_S = 10.0
# How many runs notes name.
_NAMED = 5


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
        NoCheckpoint: there is none to continue from.
        NotAvailable: with ``step``, its script writes its checkpoints itself.
        UserError: an override is wrong, or a secret's value is missing.
        LaunchError, RequestRefused: as :func:`slurmtrain.ops.shared.start.start`.
    """
    [run_id], _ = find(workspace, [name])
    directory = workspace.root.run(run_id)
    # Not waited for: the holder is about to start the run, or to end it, and this would be a second start.
    with _locked_now(directory) as lock, contextlib.ExitStack() as locks:
        earlier = cancels(directory)
        run = observe_run(workspace, run_id, ask_slurm=True)
        observe_upstreams(workspace, directory)
        _check_state(run, overrides, goes_back=from_start or step is not None)
        if step is not None:
            _check_step(workspace, directory, run, step)
        planned = _plan_next(workspace, directory, run, overrides, locks, from_start=from_start)
        secret_env = secret_values(planned.plan, planned.secrets)
        notes: list[str] = []
        if code_of_now:
            newer, notes = with_code_of_now(workspace, directory, planned.plan)
            planned = replace(planned, plan=newer)
        # After everything that can be checked first: a refused resume must leave the checkpoints where they are.
        if from_start:
            _put_checkpoints_aside(workspace, directory, run)
        elif step is not None:
            _put_later_aside(workspace, directory, run, step)
        attempt = NewAttempt(
            plan=planned.plan,
            executor=run.executor,
            number=len(run.attempts) + 1,
            secrets=secret_env,
            overrides=planned.overrides,
            from_start=from_start,
            turn=turn_of(workspace, run),
            since=last_fresh_start(run),
            predecessor=predecessor(directory, run),
            cancels=earlier,
        )
        notes += start(workspace, directory, lock, attempt, command="resume")
    return run_id, [*notes, *dependents_to_resume(workspace, [run_id])]


def _plan_next(
    workspace: Workspace,
    directory: RunDir,
    run: Run,
    overrides: Sequence[str],
    locks: contextlib.ExitStack,
    *,
    from_start: bool,
) -> PlannedRun:
    """The plan of a run's next attempt, which can start; ``locks`` gets its name's. Raises as :func:`resume`."""
    plan = current_plan(directory, run)
    planned = replan(plan, [*after_oom_overrides(run, overrides), *overrides], read_options)
    wait_for_exits(run, time.monotonic() + EXIT_S)
    if problem := upstream_problem(workspace, directory):
        raise UserError(f"{problem}; 'slurmtrain resume' that run first, then this one")
    claim_name(workspace, planned.plan.spec, run.id, locks)
    if not from_start and _may_have_trained(directory, run):
        check_checkpoint(directory, run, planned.plan)
    check_executor(workspace, run.executor, [planned.plan])
    check_trackers([planned.plan])
    if from_start:
        _check_own(directory, run, planned.plan)
    return planned


def dependents_to_resume(workspace: Workspace, run_ids: Collection[str]) -> list[str]:
    """Notes on runs that ended because one of these had failed: a person decides whether they are still wanted."""
    waiting = [run_id for run_id in dependents(workspace, run_ids) if run_id not in run_ids]
    ended = [run for run in workspace.store.load_all(waiting).values() if run.newest and run.newest.cause == UPSTREAM]
    notes = [f"run {run.id} ({run.name}) had ended because of it: 'slurmtrain resume {run.id}' too" for run in ended]
    return [*notes[:_NAMED], f"and {len(notes) - _NAMED} more"] if len(notes) > _NAMED else notes


def _may_have_trained(directory: RunDir, run: Run) -> bool:
    """Whether a run has begun, as far as is known: one that still waited for others has not, whatever ended it."""
    if directory.upstreams.exists() and not directory.upstream_facts.exists():
        return False
    return any(attempt.cause not in (EARLY, UPSTREAM) for attempt in run.attempts)


@contextlib.contextmanager
def _locked_now(directory: RunDir) -> Iterator[int]:
    """Hold the run's lock. Raises RunBusy, which names the holder, if another command has it."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(directory.lock, limit_s=0.0))
        except LockHeld as error:
            raise RunBusy(
                f"another command is at work on run {directory.id}: its lock is {error.holder}; try again in a moment"
            ) from error
        assert lock is not None
        yield lock


def _check_state(run: Run, overrides: Sequence[str], *, goes_back: bool) -> None:
    if not run.idle and run.attempts:
        raise RunBusy(f"run {run.id} is {run.state}; wait for it, or end it with 'slurmtrain cancel {run.id}'")
    if run.deleted_at is not None:
        raise RunBusy(f"the files of run {run.id} were deleted; 'slurmtrain submit' starts a new run")
    if run.state == "completed" and not overrides and not goes_back:
        raise RunBusy(
            f"run {run.id} has completed; to train it further, give it more to do, for example "
            f"'slurmtrain resume {run.id} params.steps=...'"
        )


def check_checkpoint(directory: RunDir, run: Run, plan: Plan) -> None:
    """Raise NoCheckpoint if a run has none to continue from.

    Args:
        directory: the run's directory.
        run: the run's state.
        plan: the plan of its next attempt.
    """
    again = f"'slurmtrain resume --from-start {run.id}' begins again, 'slurmtrain submit' starts a new run"
    pattern = plan.spec.checkpoint.glob
    if pattern is not None:
        from slurmtrain.runtime.checkpoint.external import Search, find_all

        matches = find_all(Search.from_plan(plan, directory, last_fresh_start(run)))
        if not any(each.complete for each in matches) and not any(directory.start.glob("*")):
            newest = f" (of {matches[0].path.name}, {matches[0].problem})" if matches else ""
            raise NoCheckpoint(f"run {run.id} has no complete checkpoint that matches {pattern!r}{newest}; {again}")
        return
    from slurmtrain.runtime.checkpoint.files import newest_published, start_point, sweep

    # A complete one counts even if its publisher was killed before the rename: the sweep renames it.
    sweep(directory.checkpoints, attempt="")
    if newest_published(directory.checkpoints) is None and start_point(directory) is None:
        raise NoCheckpoint(f"run {run.id} has no checkpoint to continue from; {again}")


def _check_own(directory: RunDir, run: Run, plan: Plan) -> None:
    """Refuse to start over a script that would find its earlier checkpoints. Raises UserError."""
    if plan.spec.checkpoint.format != OWN:
        return
    from slurmtrain.runtime.checkpoint.external import Search, find_all

    # Checkpoints in the run's own directory are put aside.
    outside = [
        each.path
        for each in find_all(Search.from_plan(plan, directory))
        if not each.path.is_relative_to(directory.checkpoints)
    ]
    if outside:
        raise UserError(
            f"the script of run {run.id} finds its checkpoints itself ('checkpoint.format: own') and would continue "
            f"from {outside[0]}; move what matches {plan.spec.checkpoint.glob!r} away, then start over"
        )


def wait_for_exits(run: Run, deadline: float) -> None:
    """Wait until all processes of a run are gone: an attempt journals its end a moment before they exit.

    Raises RunBusy if they still run at the ``deadline``, by the monotonic clock.
    """
    while alive(run):
        if time.monotonic() > deadline:
            raise RunBusy(
                f"processes of the last attempt of run {run.id} still run; 'slurmtrain cancel {run.id}' ends them"
            )
        time.sleep(0.05)


def _check_step(workspace: Workspace, directory: RunDir, run: Run, step: int) -> None:
    """Raise NoCheckpoint if there is no checkpoint of a ``step`` to go on from, or a damaged one; NotAvailable."""
    from slurmtrain.ops.shared.checkpoints import choose_checkpoints, refuse_external
    from slurmtrain.runtime.checkpoint.files import relative_path

    refuse_external(directory, run, f"move those after step {step} away, then 'slurmtrain resume {run.id}'")
    [chosen] = choose_checkpoints(workspace, run, step, to="continue from")
    bad = {each.path for each in run.on_disk if not each.complete}
    problem = "'slurmtrain verify' found it damaged" if relative_path(chosen) in bad else _damage(chosen)
    if problem:
        raise NoCheckpoint(f"run {run.id} cannot go on from step {step}: {problem}")


def _damage(checkpoint: Path) -> str:
    """What is wrong with the sizes of a checkpoint's files; empty if nothing is. Ranks compare their hashes."""
    from slurmtrain.errors import CheckpointError
    from slurmtrain.runtime.checkpoint.files import read_manifest, verify

    try:
        manifest = read_manifest(checkpoint)
        verify(checkpoint, manifest, manifest.files, hashes=False)
    except CheckpointError as error:
        return str(error)
    return ""


def _put_later_aside(workspace: Workspace, directory: RunDir, run: Run, step: int) -> None:
    """Move checkpoints aside that are later than the ``step`` to go on from.

    Call it once no process of the run is left, and :func:`check_checkpoint` has published what was complete: a
    checkpoint whose publisher was killed before the rename is a later one, too.
    """
    from slurmtrain.runtime.checkpoint.files import published, relative_path

    later = [path for path in published(directory.checkpoints) if (checkpoint_step(path.name) or 0) > step]
    if not later:
        return
    aside = make_directory(_aside(directory, run), private=True)
    # Journaled first, and the newest moved first: if this is killed in between, the run goes on from the newest one
    # then, and the next observation of the disk reverts the events of checkpoints that were not moved.
    with workspace.journal(directory, "resume") as journal:
        for path in later:
            why = f"the run goes on from step {step}"
            journal.write(CheckpointPruned(path=relative_path(path), step=checkpoint_step(path.name), why=why))
    for path in later:
        path.rename(aside / path.name)


def _aside(directory: RunDir, run: Run) -> Path:
    """Where checkpoints are moved that the next attempt must not find."""
    return directory.path / f"checkpoints.before-attempt-{len(run.attempts) + 1}"


def _put_checkpoints_aside(workspace: Workspace, directory: RunDir, run: Run) -> None:
    if not any(directory.checkpoints.glob("*")):
        return
    aside = _aside(directory, run)
    if aside.exists():
        raise UserError(f"{aside} exists already; move it away and try again")
    # Journaled first: if this is killed before the rename, the next observation of the disk reverts these events.
    with workspace.journal(directory, "resume") as journal:
        for checkpoint in run.on_disk:
            why = "the run starts over"
            journal.write(CheckpointPruned(path=checkpoint.path, step=checkpoint.step, why=why))
    directory.checkpoints.rename(aside)
    make_directory(directory.checkpoints, private=True)
