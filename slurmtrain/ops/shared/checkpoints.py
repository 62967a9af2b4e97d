"""What all commands on checkpoints begin with: the run, and those of its checkpoints that are meant."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import NoCheckpoint, NotAvailable, PlaceError
from slurmtrain.model.run.layout import RunDir, checkpoint_name, checkpoint_step, damaged_step
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import files

# So many steps are listed where one is asked for that is not there.
_SHOWN = 10


def loaded(workspace: Workspace, run_id: str, *, ask_slurm: bool = False) -> Run:
    """The run as it is known now."""
    observe(workspace, [run_id], ask_slurm=ask_slurm)
    run = workspace.store.load(run_id)
    assert run is not None
    return run


def pick(workspace: Workspace, run: Run, step: int | None, *, to: str) -> list[Path]:
    """The published checkpoints of a run, newest first, or the one of a step. ``to``: what is to be done with them.

    Raises NoCheckpoint where there is none, NotAvailable for a run whose script brings its own.
    """
    directory = workspace.root.run(run.id)
    refuse_own(directory, run, f"this version cannot {to} what it writes")
    place = directory.checkpoints
    there, damaged = files.published(place), files.damaged(place)
    if not there:
        aside = f"; {len(damaged)} that were damaged are put aside there" if damaged else ""
        raise NoCheckpoint(f"run {run.id} has no checkpoint to {to} in {place}{aside}")
    if step is None:
        return there
    if (wanted := place / checkpoint_name(step)) in there:
        return [wanted]
    steps = ", ".join(str(checkpoint_step(path.name)) for path in reversed(there[:_SHOWN]))
    newest = "the newest are" if len(there) > _SHOWN else "there are"
    aside = "; it was damaged, and is put aside" if step in map(damaged_step, (path.name for path in damaged)) else ""
    raise NoCheckpoint(f"run {run.id} has no checkpoint of step {step}{aside}; {newest} those of step {steps}")


def refuse_own(directory: RunDir, run: Run, why: str) -> None:
    """Raises NotAvailable for a run whose script brings its own checkpoints."""
    try:
        pattern = current_plan(directory, run).spec.checkpoint.glob
    except PlaceError:
        return
    if pattern is not None:
        raise NotAvailable(
            f"the script of run {run.id} brings its own checkpoints ('checkpoint.glob: {pattern}'): {why}"
        )
