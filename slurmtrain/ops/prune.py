"""Deleting the checkpoints that a run's own policy lets go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint import CheckpointPruned
from slurmtrain.model.run.events.command import JobObserved
from slurmtrain.model.run.layout import MANIFEST, RunDir, checkpoint_name, checkpoint_step, staged_step
from slurmtrain.model.run.retention import Saved, reasons
from slurmtrain.model.run.run import PUBLISHED, Run
from slurmtrain.model.spec.spec import KeepSpec
from slurmtrain.ops.shared.checkpoints import refuse_external
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.run_files import checkpoints_on_disk
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import files
from slurmtrain.system.files import describe_os_error, locked
from slurmtrain.system.journal import Journal

# Temporary directories have the name of an attempt; of a run that is over, all are litter.
_NO_ATTEMPT = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an attempt that died left half-built or half-deleted.

    ``complete``: it only lacks its name as a checkpoint, and gets it.
    """

    path: Path
    bytes: int
    complete: bool


@dataclass(slots=True)
class Pruned:
    """What was deleted of a run, or, with ``dry``, would be."""

    run: Run
    dry: bool
    checkpoints: list[files.Disposable] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What was freed."""
        litter = [left.bytes for left in self.leftovers if not left.complete]
        return sum([*litter, *(one.bytes for one in self.checkpoints)])

    def to_dict(self) -> dict[str, Any]:
        """What ``prune --json`` prints."""
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "dry_run": self.dry,
            "pruned": [
                {"step": one.step, "path": str(one.path), "bytes": one.bytes, "why": one.why}
                for one in self.checkpoints
            ],
            "leftovers": [
                {"path": str(left.path), "bytes": left.bytes, "complete": left.complete} for left in self.leftovers
            ],
            "bytes": self.bytes,
            "problems": self.problems,
        }


def prune(workspace: Workspace, run_id: str, *, dry: bool = False) -> Pruned:
    """Delete the checkpoints that the run's own policy lets go, also while it trains, and what dead attempts left.

    ``dry``: change nothing. Raises NotAvailable for a run whose script brings its own, PlaceError where the policy
    cannot be read.
    """
    directory = workspace.root.run(run_id)
    run = observe_run(workspace, run_id, ask_slurm=True)
    refuse_external(directory, run, "it deletes them itself")
    keep = current_plan(directory, run).spec.checkpoint.keep
    if dry:
        left = _leftovers(directory) if _is_over(run) else []
        return Pruned(run, True, _disposable(directory, run, keep), left)
    # As long as this is held, no command starts the next attempt.
    with locked(directory.lock, wait=False) as lock, workspace.journal(directory, "prune") as journal:
        run = observe_run(workspace, run_id, ask_slurm=False)
        pruned = Pruned(run, False)
        idle = lock is not None and _is_over(run)
        if idle:
            _sweep(directory, pruned)
        for one in _disposable(directory, run, keep):
            if _delete(one, pruned):
                # Not before: nobody would ever take back a line about what could not be deleted. What is missing, if
                # this is killed here, is added below by the next one.
                _note(journal, pruned, CheckpointPruned(path=files.relative_path(one.path), step=one.step, why=one.why))
        if idle:
            _catch_up(directory, run, journal, pruned)
    return pruned


def _delete(one: files.Disposable, pruned: Pruned) -> bool:
    try:
        files.delete(one.path)
    except FileNotFoundError:
        return False  # the run was faster, and journals it
    except OSError as error:
        pruned.problems.append(f"{one.path} cannot be deleted: {describe_os_error(error)}")
        return False
    pruned.checkpoints.append(one)
    return True


def _note(journal: Journal, pruned: Pruned, event: Payload) -> None:
    try:
        journal.write(event)
    except OSError as error:
        pruned.problems.append(f"{journal.path} cannot be written: {describe_os_error(error)}")


def _disposable(directory: RunDir, run: Run, keep: KeepSpec) -> list[files.Disposable]:
    """What the policy lets go, choosing what stays among those that nobody has found to be bad.

    A bad one is at its place until the run puts it aside, and must not stand for a good one meanwhile.
    """
    found = files.disposable(directory.checkpoints, keep)
    bad = {one.path for one in run.on_disk if one.path.startswith(PUBLISHED) and not one.complete}
    good = [path for path in files.published(directory.checkpoints) if files.relative_path(path) not in bad]
    if not bad:
        return found
    if not good:
        return []
    staying = reasons([Saved(step, metrics) for step, metrics in map(_step_and_metrics, good)], keep)
    return [one for one in found if one.step not in staying or checkpoint_step(one.path.name) is None]


def _step_and_metrics(path: Path) -> tuple[int, Mapping[str, float]]:
    step = checkpoint_step(path.name)
    assert step is not None
    with contextlib.suppress(CheckpointError):
        return step, files.read_manifest(path).metrics
    return step, {}


def _is_over(run: Run) -> bool:
    """Whether no process of the run can write any more."""
    if run.executor == "local":
        return run.idle and alive(run) is False
    return run.idle and (run.newest is None or run.newest.settled)


def _sweep(directory: RunDir, pruned: Pruned) -> None:
    pruned.leftovers = _leftovers(directory)
    files.sweep(directory.checkpoints, _NO_ATTEMPT)
    for left in [left for left in pruned.leftovers if left.path.exists()]:
        pruned.leftovers.remove(left)
        pruned.problems.append(f"{left.path} cannot be deleted")


def _leftovers(directory: RunDir) -> list[Leftover]:
    """What :func:`checkpointfiles.sweep` does away with while no attempt is under way."""
    with contextlib.suppress(OSError):
        entries = [e for e in os.scandir(directory.checkpoints) if e.name.startswith(".") and e.is_dir()]
        return [_leftover(directory, entry.name) for entry in sorted(entries, key=lambda entry: entry.name)]
    return []


def _leftover(directory: RunDir, name: str) -> Leftover:
    path, step = directory.checkpoints / name, staged_step(name)
    whole = step is not None and (path / MANIFEST).exists()
    complete = whole and step is not None and not (directory.checkpoints / checkpoint_name(step)).exists()
    return Leftover(path, files.bytes_of(path), complete)


def _catch_up(directory: RunDir, run: Run, journal: Journal, pruned: Pruned) -> None:
    """Journal what the disk says otherwise, of a run of which nobody else writes: a kill came before the line."""
    deleted = {files.relative_path(one.path) for one in pruned.checkpoints}
    known = {one.path: one for one in run.on_disk if one.path.startswith(f"{directory.checkpoints.name}/")}
    for path in [path for path in known if path not in deleted and not (directory.path / path).exists()]:
        _note(journal, pruned, CheckpointPruned(path=path, step=known[path].step, why="it was gone"))
    there = files.published(directory.checkpoints)
    described = checkpoints_on_disk(directory)
    # Of one whose manifest cannot be read, this would say that it is gone.
    if len(described) == len(there) and any(record.path not in known for record in described):
        _note(journal, pruned, JobObserved(source="host", checkpoints=described))
