"""Deleting the checkpoints that a run's own policy (checkpoint.keep) does not keep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import KeepSpec, Saved, reasons_to_keep
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointPruned
from slurmtrain.model.run.events.command_events import JobObserved
from slurmtrain.model.run.layout import MANIFEST, RunDir, checkpoint_name, checkpoint_step, staged_step
from slurmtrain.model.run.run import PUBLISHED, Run
from slurmtrain.ops.shared.local_jobs import alive, checkpoints_on_disk
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.readable_checkpoints import refuse_external
from slurmtrain.ops.shared.run_details import find_forks
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked

# Temporary directories are named after their attempt, and the sweep skips the active attempt's; a run that is over has
# no active attempt.
_NO_ATTEMPT = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A checkpoint that a dead attempt left half-written or half-deleted.

    ``complete``: only the final rename is missing; it is renamed, not deleted.
    """

    path: Path
    bytes: int
    complete: bool


@dataclass(slots=True)
class Pruned:
    """What was deleted in a run or, with ``dry``, would be.

    ``forks``: the runs that began with its checkpoints, and have copies of their own, by step. ``problems``: what could
    not be deleted or journaled.
    """

    run: Run
    dry: bool
    forks: Mapping[int | None, Sequence[str]]
    checkpoints: list[checkpoint_files.Disposable] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """How many bytes were, or would be, freed."""
        deleted = [leftover.bytes for leftover in self.leftovers if not leftover.complete]
        return sum([*deleted, *(checkpoint.bytes for checkpoint in self.checkpoints)])

    def to_dict(self) -> dict[str, Any]:
        """What ``prune --json`` prints."""
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "dry_run": self.dry,
            "pruned": [
                {
                    "step": each.step,
                    "path": str(each.path),
                    "bytes": each.bytes,
                    "why": each.why,
                    "forks": list(self.forks.get(each.step, ())),
                }
                for each in self.checkpoints
            ],
            "leftovers": [{**asdict(leftover), "path": str(leftover.path)} for leftover in self.leftovers],
            "bytes": self.bytes,
            "problems": self.problems,
        }


def prune(workspace: Workspace, run_id: str, *, dry: bool = False) -> Pruned:
    """Delete checkpoints that a run's own policy does not keep, even while it trains, and leftovers of dead attempts.

    Args:
        workspace: where the run is.
        run_id: the run.
        dry: change nothing.

    Raises:
        NotAvailable: the run's script writes its own checkpoints.
        PathError: the policy cannot be read.
    """
    directory = workspace.root.run(run_id)
    run = observe_run(workspace, run_id, ask_slurm=True)
    refuse_external(directory, run, "it deletes them itself")
    keep = current_plan(directory, run).spec.checkpoint.keep
    forks = find_forks(workspace, run_id)
    if dry:
        leftovers = _leftovers(directory) if has_no_writer(run) else []
        return Pruned(run, True, forks, _disposable(directory, run, keep), leftovers)
    # While this is held, no command starts the next attempt. Without it, only the policy is applied.
    with locked(directory.lock, wait=False) as lock, workspace.journal(directory, "prune") as journal:
        run = observe_run(workspace, run_id, ask_slurm=False)
        pruned = Pruned(run, False, forks)
        idle = lock is not None and has_no_writer(run)
        if idle:
            leftovers = _leftovers(directory)
            checkpoint_files.sweep(directory.checkpoints, _NO_ATTEMPT)
            pruned.leftovers = [leftover for leftover in leftovers if not leftover.path.exists()]
            pruned.problems += [f"{each.path} cannot be deleted" for each in leftovers if each.path.exists()]
        for checkpoint in _disposable(directory, run, keep):
            try:
                checkpoint_files.delete_checkpoint(checkpoint.path)
            except FileNotFoundError:
                continue  # the run deleted it first, and journals that
            except OSError as error:
                pruned.problems.append(f"{checkpoint.path} cannot be deleted: {describe_os_error(error)}")
                continue
            pruned.checkpoints.append(checkpoint)
            # Journaled after deleting: an event about a checkpoint that then cannot be deleted would stay forever.
            # If this is killed here, _catch_up() adds the missing event next time.
            path = checkpoint_files.relative_path(checkpoint.path)
            _journal(journal, pruned, CheckpointPruned(path=path, step=checkpoint.step, why=checkpoint.why))
        if idle:
            _catch_up(directory, run, journal, pruned)
    return pruned


def _journal(journal: Journal, pruned: Pruned, event: Payload) -> None:
    try:
        journal.write(event)
    except OSError as error:
        pruned.problems.append(f"{journal.path} cannot be written: {describe_os_error(error)}")


def _disposable(directory: RunDir, run: Run, keep: KeepSpec) -> list[checkpoint_files.Disposable]:
    """What the policy does not keep. It considers only checkpoints not known to be bad.

    A bad one stays in place until the run moves it aside; the policy must not keep it instead of a good one.
    """
    disposable = checkpoint_files.disposable_checkpoints(directory.checkpoints, keep)
    bad = {each.path for each in run.on_disk if each.path.startswith(PUBLISHED) and not each.complete}
    good = [
        path
        for path in checkpoint_files.published(directory.checkpoints)
        if checkpoint_files.relative_path(path) not in bad
    ]
    if not bad:
        return disposable
    if not good:
        return []
    saved = []
    for path in good:
        step, metrics = checkpoint_step(path.name), dict[str, float]()
        assert step is not None
        with contextlib.suppress(CheckpointError):
            metrics = dict(checkpoint_files.read_manifest(path).metrics)
        saved.append(Saved(step, metrics))
    kept = reasons_to_keep(saved, keep)
    return [each for each in disposable if each.step not in kept or checkpoint_step(each.path.name) is None]


def has_no_writer(run: Run) -> bool:
    """Whether no process of the run can write any more."""
    if run.executor == "local":
        # Not None either: on another machine something may still write.
        return run.idle and alive(run) is False
    return run.idle and (run.newest is None or run.newest.settled)


def _leftovers(directory: RunDir) -> list[Leftover]:
    """What ``checkpoint_files.sweep`` removes or completes while no attempt is active."""
    leftovers = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(entry) for entry in os.scandir(directory.checkpoints) if entry.is_dir()):
            if path.name.startswith("."):
                step = staged_step(path.name)
                is_whole = (path / MANIFEST).exists()
                complete = (
                    step is not None and is_whole and not (directory.checkpoints / checkpoint_name(step)).exists()
                )
                leftovers.append(Leftover(path, checkpoint_files.bytes_of(path), complete))
    return leftovers


def _catch_up(directory: RunDir, run: Run, journal: Journal, pruned: Pruned) -> None:
    """Journal where the disk differs from the journals: a command or attempt was killed before it wrote its event.

    Call this only for a run that nothing else writes to.
    """
    deleted = {checkpoint_files.relative_path(checkpoint.path) for checkpoint in pruned.checkpoints}
    journaled = {each.path: each for each in run.on_disk if each.path.startswith(f"{directory.checkpoints.name}/")}
    for path in [path for path in journaled if path not in deleted and not (directory.path / path).exists()]:
        _journal(journal, pruned, CheckpointPruned(path=path, step=journaled[path].step, why="it was gone"))
    published = checkpoint_files.published(directory.checkpoints)
    described = checkpoints_on_disk(directory)
    # The event lists all checkpoints: one whose manifest cannot be read would be taken as gone.
    if len(described) == len(published) and any(record.path not in journaled for record in described):
        _journal(journal, pruned, JobObserved(source="host", checkpoints=described))
