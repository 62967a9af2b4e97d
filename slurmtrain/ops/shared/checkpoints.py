"""Choosing the checkpoints of a run that a command applies to."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import NoCheckpoint, NotAvailable, PathError
from slurmtrain.model.run.file_names import checkpoint_name, checkpoint_step, damaged_step
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import files

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
    published, damaged = files.published(place), files.damaged(place)
    if not published:
        aside = f"; {len(damaged)} damaged, moved aside there" if damaged else ""
        raise NoCheckpoint(f"run {run.id} has no checkpoint to {to} in {place}{aside}")
    if step is None:
        return published
    if (path := place / checkpoint_name(step)) in published:
        return [path]
    steps = ", ".join(str(checkpoint_step(path.name)) for path in reversed(published[:_SHOWN]))
    newest = "the newest are" if len(published) > _SHOWN else "there are"
    aside = "; it was damaged and moved aside" if step in map(damaged_step, (path.name for path in damaged)) else ""
    raise NoCheckpoint(f"run {run.id} has no checkpoint of step {step}{aside}; {newest} those of step {steps}")


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
            f"the script of run {run.id} brings its own checkpoints ('checkpoint.glob: {pattern}'): {why}"
        )
