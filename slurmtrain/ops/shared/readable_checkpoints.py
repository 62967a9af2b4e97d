"""The checkpoints of a run that a command reads: published ones, and what a script saves by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurmtrain.errors import NoCheckpoint, NotAvailable, PathError
from slurmtrain.model.run.layout import RunDir, checkpoint_name, checkpoint_step, damaged_step
from slurmtrain.model.run.run import Checkpoint, Run
from slurmtrain.ops.shared.next_attempts import current_plan, last_fresh_start
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search, find_checkpoints
from slurmtrain.runtime.environment.node import read_plan

# How many steps an error lists if the requested one has no checkpoint.
_SHOWN = 10


def choose_checkpoints(workspace: Workspace, run: Run, step: int | None, *, to: str) -> list[Path]:
    """The published checkpoints of a run, newest first, or the one of a step.

    Args:
        workspace: where the run is.
        run: the run.
        step: the step; None for all checkpoints.
        to: what will be done with them: a verb for messages.

    Raises:
        NoCheckpoint: there is none.
    """
    directory = workspace.root.run(run.id)
    place = directory.checkpoints
    published, damaged = checkpoint_files.published(place), checkpoint_files.damaged(place)
    if not published:
        aside = f"; {len(damaged)} damaged, moved aside there" if damaged else ""
        raise NoCheckpoint(f"run {run.id} has no checkpoint to {to} in {place}{aside}")
    if step is None:
        return published
    if (path := place / checkpoint_name(step)) in published:
        return [path]
    steps = ", ".join(str(checkpoint_step(path.name)) for path in reversed(published[:_SHOWN]))
    newest = "its newest steps are" if len(published) > _SHOWN else "its steps are"
    aside = "; it was damaged and moved aside" if step in map(damaged_step, (path.name for path in damaged)) else ""
    raise NoCheckpoint(f"run {run.id} has no checkpoint of step {step}{aside}; {newest} {steps}")


def refuse_external(directory: RunDir, run: Run, why: str) -> None:
    """Raise NotAvailable if the script of ``run``, in ``directory``, writes its own checkpoints.

    ``why``: why that matters to the command; it ends the message.
    """
    try:
        pattern = current_plan(directory, run).spec.checkpoint.glob
    except PathError:
        return  # its plan is gone, but what is on disk can still be handled
    if pattern is not None:
        raise NotAvailable(
            f"the script of run {run.id} writes its own checkpoints ('checkpoint.glob: {pattern}'): {why}"
        )


# --- checkpoints that scripts save -----------------------------------------------------------------------------------


def find_own(directory: RunDir, run: Run) -> list[ExternalCheckpoint] | None:
    """The checkpoints that the script of ``run``, in ``directory``, has left, the newest first; also incomplete ones.

    None if slurmtrain saves its checkpoints, or if the run has no plan that says where they are.
    """
    try:
        plan = current_plan(directory, run)
    except PathError:
        return None
    if plan.spec.checkpoint.glob is None:
        return None
    return find_checkpoints(Search.from_plan(plan, directory, last_fresh_start(run)))


def newest_own(workspace: Workspace, run_id: str, recorded: Checkpoint | None) -> Checkpoint | None:
    """The newest checkpoint that the script of a run has left by now, or else the ``recorded`` one.

    Agents look for it when ranks start and end, and a script may have saved, or rewritten its file, since.

    Args:
        workspace: Where the run is.
        run_id: The run.
        recorded: The newest that is recorded.
    """
    directory = workspace.root.run(run_id)
    with contextlib.suppress(PathError, OSError):
        # Of most runs the first plan alone tells that slurmtrain saves.
        first = read_plan(directory.plan) if recorded is None or recorded.format is None else None
        if first is not None and first.spec.checkpoint.glob is None:
            return recorded
        run = workspace.store.load(run_id)
        own = (find_own(directory, run) or ()) if run is not None else ()
        newest = next((each for each in own if each.complete), None)
        if run is not None and newest is not None:
            records = {(Path(each.path), each.saved_at): each for each in run.checkpoints}
            return _as_checkpoint(run, newest, records.get((newest.path, newest.saved_at)))
    return recorded


def choose_own(run: Run, own: Sequence[ExternalCheckpoint], step: int | None, *, to: str) -> list[ExternalCheckpoint]:
    """All of a run's own checkpoints, or the ones of a ``step``. Raises NoCheckpoint if there is none.

    ``run``: the run. ``own``: its checkpoints. ``to``: their purpose: a verb for messages.
    """
    if not own:
        raise NoCheckpoint(f"run {run.id} has no checkpoint to {to}: nothing matches its checkpoint.glob")
    chosen = [each for each in own if step is None or each.step == step]
    if not chosen:
        steps = ", ".join(str(each.step) for each in own[:_SHOWN] if each.step is not None) or "unknown steps"
        raise NoCheckpoint(f"run {run.id} has no checkpoint of step {step}; its newest steps are {steps}")
    return chosen


def as_checkpoints(run: Run, own: Sequence[ExternalCheckpoint]) -> list[Checkpoint]:
    """The ``own`` checkpoints of a run as the run's records have them, the oldest first, then missing ones.

    The record of a checkpoint, such as that it was verified, is kept.
    """
    # By time as well: a script may write the same file again, and that is another checkpoint.
    recorded = {(Path(each.path), each.saved_at): each for each in run.checkpoints}
    on_disk = [_as_checkpoint(run, each, recorded.get((each.path, each.saved_at))) for each in reversed(own)]
    paths = {(Path(each.path), each.saved_at) for each in on_disk}
    gone = [
        # Nobody has noted when it went: any time keeps it from counting as on disk.
        each if each.pruned_at is not None else replace(each, pruned_at=each.saved_at)
        for place, each in recorded.items()
        if place not in paths
    ]
    return [*gone, *on_disk]


def _as_checkpoint(run: Run, own: ExternalCheckpoint, recorded: Checkpoint | None) -> Checkpoint:
    started = (a for a in reversed(run.attempts) if a.started_at is not None)
    # A script does not say which attempt has saved: it is the last that had started by then.
    attempt = next((a.number for a in started if (a.started_at or 0.0) <= own.saved_at), None)
    return Checkpoint(
        step=own.step,
        path=str(own.path),
        bytes=own.bytes,
        saved_at=own.saved_at,
        seconds=None,
        complete=own.complete and (recorded is None or recorded.complete),
        verified=recorded is not None and recorded.verified,
        why="found",
        attempt=attempt,
        format=own.format,
        step_from=own.step_from,
    )
