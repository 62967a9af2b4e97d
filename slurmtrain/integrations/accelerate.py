"""For training loops with Hugging Face accelerate: checkpoints that are complete or not there at all.

``Accelerator.save_state`` writes into the directory that it is given, file by file, without an end that could be told
from a kill half-way, and with ``ProjectConfiguration(total_limit=1)`` it deletes the last checkpoint before it writes
the next. :func:`save_state` writes under a temporary name, renames when all ranks are done, and deletes after that.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from accelerate import Accelerator

from slurmtrain.errors import UserError
from slurmtrain.runtime.training.loop import current

_DIRECTORY = re.compile(r"checkpoint-(\d+)")
# Directories with the suffix .tmp never count as checkpoints.
_LEFTOVER = re.compile(r"checkpoint-(\d+)(?:\.replaced)?\.tmp")


def load_state(accelerator: Accelerator) -> int:
    """Restore the checkpoint that the run continues from. Call it on all ranks, after ``accelerator.prepare()``.

    The position in a data loader is part of it only with ``DataLoaderConfiguration(use_stateful_dataloader=True)``;
    without, ``accelerator.skip_first_batches()`` is up to the script.

    Args:
        accelerator: What :func:`save_state` saves.

    Returns:
        The number of finished steps; 0 if there is no checkpoint, as outside a job.

    Raises:
        UserError: The accelerator does not train on all ranks, or the checkpoint is not one of :func:`save_state`.
    """
    loop = current()
    loop.listen()
    loop.check_world(accelerator.num_processes, "without GPUs it needs Accelerator(cpu=True)")
    path = loop.worker.resume_from
    if path is None:
        return 0
    match = _DIRECTORY.fullmatch(Path(path).name)
    if match is None:
        raise UserError(
            f"{path} is not a checkpoint of slurmtrain.integrations.accelerate.save_state(), whose names are "
            "checkpoint-<step>: let checkpoint.glob of the spec match these, as in '{checkpoint_dir}/checkpoint-*'"
        )
    accelerator.load_state(path)
    return int(match[1])


def save_state(accelerator: Accelerator, step: int, directory: str | Path | None = None, *, keep: int = 2) -> Path:
    """Save a checkpoint of everything that the ``accelerator`` has prepared. Call it on all ranks.

    Args:
        accelerator: As for :func:`load_state`.
        step: Finished steps.
        directory: Where to save ``checkpoint-<step>``; by default the run's directory for checkpoints, and
            ``checkpoints`` outside a job. All nodes must see it.
        keep: How many checkpoints to keep there, this one included; at least 1.

    Returns:
        The path of the checkpoint.

    Raises:
        ValueError: ``keep`` is less than 1.
        UserError: The accelerator names checkpoints itself, and would ignore the path.
    """
    if keep < 1:
        raise ValueError(f"save_state() must keep at least one checkpoint, not {keep}")
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UserError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) makes accelerate ignore where to save, and its "
            "total_limit deletes checkpoints before the next is written: remove both, and use save_state(keep=...)"
        )
    loop = current()
    if directory is None:
        directory = loop.worker.attempt.run.checkpoints if loop.worker.attempt is not None else "checkpoints"
    path = Path(directory) / f"checkpoint-{step}"
    unfinished = path.with_name(f"{path.name}.tmp")
    loop.begin_save()
    try:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
        # No rank writes before the leftovers are gone.
        accelerator.wait_for_everyone()
        accelerator.save_state(str(unfinished))
        # The directory gets its name only when all ranks have written their files.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # A kill between these renames leaves two names that do not count: the run goes on from an older checkpoint.
            replaced = path.with_name(f"{path.name}.replaced.tmp")
            if path.exists():  # by an earlier attempt
                path.rename(replaced)
            unfinished.rename(path)
            shutil.rmtree(replaced, ignore_errors=True)
            _delete_older(path.parent, step, keep)
        # No rank returns a path that is not there yet.
        accelerator.wait_for_everyone()
    finally:
        loop.continue_steps()
    return path


def _delete_older(directory: Path, step: int, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints up to this ``step``, and what killed saves have left."""
    older = []
    for path in directory.iterdir():
        if (match := _DIRECTORY.fullmatch(path.name)) and int(match[1]) < step:
            older.append((int(match[1]), path))
        elif (match := _LEFTOVER.fullmatch(path.name)) and int(match[1]) < step:
            shutil.rmtree(path, ignore_errors=True)
    for _, path in sorted(older)[: len(older) - keep + 1]:
        shutil.rmtree(path, ignore_errors=True)
