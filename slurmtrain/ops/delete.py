"""Deleting runs: their files, or everything, once they have ended.

The files of a run are deleted under its lock, in this order. What a killed ``delete`` has left, the next one deletes,
and ``status`` says so; no other command does, since nothing is deleted on the word of a journal alone.

1. The ``delete`` event: from now on the run is deleted, and never resumed.
2. A ``pruned`` event for each checkpoint in the run directory.
3. The files go, except files that :func:`~slurmtrain.model.run.layout.outlives_deletion` names.
4. Its traces at trackers elsewhere go, under their lock: ``sync`` sends them nothing of it any more.
5. The ``deleted`` event.

On a full disk 1 and 2 come after 3.

Of a run that is to be forgotten, trackers' files go first, since nobody could find them afterwards. Then it gets the
name of a directory that was never finished, which ``sync`` removes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, RunBusy, RunUnreadable, SlurmtrainError
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointPruned
from slurmtrain.model.run.events.command_events import DeletionRequested, FilesDeleted
from slurmtrain.model.run.layout import RunDir, outlives_deletion
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.observe import Observed, observe, observe_run
from slurmtrain.ops.shared.run_details import find_forks
from slurmtrain.ops.shared.trackers import Target, targets_of
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.ops.tree_removal import Removal, remove_tree, unlink_logs
from slurmtrain.registry.rows import Listed
from slurmtrain.runtime.code.code_copy import results_in_copy
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.files import DIRECTORY_MODE, FULL, describe_os_error, fsync_directory
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import check_owner, open_directory, read_checked
from slurmtrain.tracking.tracker import files_of_tracker, writes_files

_WHY = "the run was deleted"


@dataclass(frozen=True, slots=True)
class Deletable:
    """A run that can be deleted, and what that does.

    ``removal``: what goes with it. ``results``: how many bytes of that scripts have written next to their code.
    ``forks``: the runs that began with its checkpoints, and have copies of their own, by step.
    """

    listed: Listed
    removal: Removal
    results: int = 0
    forks: Mapping[int | None, Sequence[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Deleted:
    """The result of a deletion: the deleted runs, by id, and the remaining parts, with the reasons."""

    removed: dict[str, Removal] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """How much space was freed."""
        return sum(removal.bytes for removal in self.removed.values())


def find_deletable(workspace: Workspace, names: Sequence[str], *, forget: bool) -> dict[str, Deletable]:
    """The runs to delete, by id, without those whose files are deleted already.

    Args:
        workspace: where they are.
        names: names, sweeps and patterns, as :func:`~slurmtrain.ops.shared.find.choose` takes them.
        forget: nothing of them is to stay.

    Raises:
        RunNotFound: a name refers to no run.
        RunBusy: a run has not ended, or one that has not ended needs it.
        RunUnreadable: a run cannot be read, so that only all of it can be deleted.
        SlurmDown: nobody knows whether the job of a run that cannot be read still runs.
    """
    observed = observe(workspace)
    run_ids = choose_all(workspace, observed.runs, names)
    chosen = observed.runs.fetch(run_ids)
    for run_id, listed in chosen.items():
        _check_over(workspace, run_id, listed, forget=forget)
    _check_not_needed(workspace, observed, run_ids)
    todo = {run_id: listed for run_id, listed in chosen.items() if forget or listed.row["freed"] is None}
    deletable = {}
    for run_id, listed in todo.items():
        directory = workspace.root.run(run_id)
        if _leads_anywhere(directory, listed):
            removal = Removal(links=[str(directory.path)])
        else:
            removal = _remove(directory, forget=forget, dry=True)
            removal.add(remove_tracker_files(workspace, run_id, file_targets(workspace, directory), dry=True))
        deletable[run_id] = Deletable(listed, removal, results_in_copy(directory), find_forks(workspace, run_id))
    return deletable


def delete(workspace: Workspace, runs: Mapping[str, Deletable], *, forget: bool) -> Deleted:
    """Delete runs, one after the other.

    Args:
        workspace: where they are.
        runs: as :func:`find_deletable` returned them.
        forget: let nothing of them stay.
    """
    deleted = Deleted()
    for run_id, run in runs.items():
        try:
            if _leads_anywhere(workspace.root.run(run_id), run.listed):
                removal = _forget(workspace, run_id, is_link=True)
            elif forget:
                removal = _forget(workspace, run_id)
            else:
                removal = _delete_files(workspace, run_id, run.removal.bytes)
        except (SlurmtrainError, OSError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else str(error)
            deleted.problems.append(f"run {run_id} was not deleted: {why}")
            continue
        deleted.removed[run_id] = removal
        deleted.problems += removal.problems
    return deleted


def _check_over(workspace: Workspace, run_id: str, listed: Listed, *, forget: bool) -> None:
    """Raise RunBusy unless a run has ended, and RunUnreadable if that cannot be known and something is to stay."""
    if listed.unreadable:
        if not forget:
            raise RunUnreadable(
                f"run {run_id} is unreadable: {listed.reason}; fix that, or delete the whole run with --forget"
            )
        _check_nothing_runs(workspace, run_id, workspace.store.load(run_id))
    elif not listed.ended:
        raise RunBusy(
            f"run {run_id} ({listed.name}) is {listed.state}; 'slurmtrain cancel {run_id}' ends it first; "
            "nothing was deleted"
        )
    else:
        run = observe_run(workspace, run_id, ask_slurm=False)
        if run.newest is not None and (run.executor == "local" or not run.newest.settled):
            _check_nothing_runs(workspace, run_id, run)


def _check_nothing_runs(workspace: Workspace, run_id: str, run: Run | None) -> None:
    """Raise RunBusy if a process here, or a job in Slurm, belongs to a run. Raises SlurmDown."""
    from slurmtrain.ops.shared.local_jobs import processes_of

    executor = run.executor if run is not None else ""
    if executor != "slurm" and (processes := processes_of(workspace.root.run(run_id), run)):
        pids = ", ".join(str(process.pid) for process in processes)
        raise RunBusy(f"processes of run {run_id} still run ({pids}); 'slurmtrain cancel {run_id}' ends them")
    if executor == "local":
        return
    # Imported here: most runs that are deleted have ended long ago, and their jobs with them.
    from slurmtrain.ops.shared.slurm_jobs import live_jobs
    from slurmtrain.slurm.slurm_commands import is_installed

    if is_installed("squeue") and (jobs := live_jobs(workspace, run_id, run)):
        raise RunBusy(
            f"job {', '.join(jobs)} of run {run_id} has not ended yet; 'scancel' ends it; nothing was deleted"
        )


def _check_not_needed(workspace: Workspace, observed: Observed, run_ids: Sequence[str]) -> None:
    """Raise RunBusy if another run, which has not ended, mentions one of these runs in its plan, or starts after it."""
    chosen = set(run_ids)
    for other, row in observed.runs.index.items():
        if row.ended or other in chosen:
            continue
        directory = workspace.root.run(other)
        has_copy, text = any(directory.start.glob("*")), b""
        with contextlib.suppress(OSError, PathError):
            for path in (directory.plan, *directory.submissions.glob("*/plan.json")):
                plan = read_checked(path)
                # The checkpoint that a run began with is not needed any more once the run has a copy of it.
                with contextlib.suppress(ValueError, AttributeError):
                    fields = json.loads(plan)
                    for name in ("spec", "template") if has_copy else ():
                        fields.get(name, {}).pop("start_from", None)
                    plan = json.dumps(fields).encode()
                text += plan
        with contextlib.suppress(OSError, PathError):
            # The ids of the runs that it starts after, and once it begins, their results.
            text += read_checked(directory.upstream_facts if directory.upstream_facts.exists() else directory.upstreams)
        # As text: a command or a param may name a path in that run's directory.
        if needed := next((run_id for run_id in run_ids if run_id.encode() in text), None):
            raise RunBusy(
                f"run {other} ({row.name}) has not ended and may need the files of run {needed}: its plan names that "
                "run, or it starts after it; nothing was deleted"
            )


def _delete_files(workspace: Workspace, run_id: str, frees: int) -> Removal:
    """Delete the files of a run. ``frees``: how many bytes that frees, as far as is known."""
    directory = workspace.root.run(run_id)
    with _locked_now(directory):
        run = observe_run(workspace, run_id, ask_slurm=False)
        if not run.ended:
            raise RunBusy(f"it is {run.state} now")
        events: list[Payload] = [] if run.deleted_at is not None else [DeletionRequested(bytes=frees, by=person())]
        events += [
            CheckpointPruned(path=each.path, step=each.step, why=_WHY)
            for each in run.on_disk
            if not Path(each.path).is_absolute()
        ]
        with workspace.journal(directory, "delete") as journal:
            try:
                _journal_all(journal, events)
            except OSError as error:
                # On a full disk space comes first: a kill in between leaves a run to be deleted once more.
                if error.errno not in FULL:
                    raise
            unlink_logs(directory)
            removal = _remove(directory, forget=False)
            _journal_all(journal, events)
            removal.add(_remove_of_trackers(workspace, directory))
            # Until this is journaled, the run counts as deleted in part, and 'delete' goes on.
            if not removal.problems:
                journal.write(FilesDeleted())
        return removal


def _remove_of_trackers(workspace: Workspace, directory: RunDir) -> Removal:
    """Remove what trackers have written of a run. Raises LockHeld if something is being sent to them for long."""
    targets = file_targets(workspace, directory)
    with locked(workspace.root.tracking_lock) if targets else contextlib.nullcontext():
        return remove_tracker_files(workspace, directory.id, targets)


def _journal_all(journal: Journal, events: list[Payload]) -> None:
    """Journal events, and take each off the list."""
    while events:
        journal.write(events[0])
        del events[0]


def _forget(workspace: Workspace, run_id: str, *, is_link: bool = False) -> Removal:
    """Remove the directory of a run, or the link that stands for it, and what the registry knows about it."""
    directory, condemned = workspace.root.run(run_id), workspace.root.unborn(run_id)
    check_owner(directory.path.lstat(), directory.path)
    # Something else may have the name of a run, such as a link that leads nowhere.
    if is_link or not directory.path.is_dir():
        directory.path.unlink()
        workspace.store.write(lambda transaction: transaction.remove([run_id]))
        return Removal(links=[str(directory.path)] if is_link else [])
    handle = open_directory(directory.path, check=check_owner)
    try:
        # The lock of a directory that others can write to is refused.
        os.fchmod(handle, DIRECTORY_MODE)
    finally:
        os.close(handle)
    with _locked_now(directory):
        removal = _remove_of_trackers(workspace, directory)
        unlink_logs(directory)
        # Its lock is renamed with it, so that no 'sync' interferes.
        directory.path.rename(condemned.path)
        fsync_directory(workspace.root.path)
        removal.add(_remove(condemned, forget=True))
        with contextlib.suppress(OSError):
            condemned.path.unlink() if condemned.path.is_symlink() else condemned.path.rmdir()
        with contextlib.suppress(OSError):
            workspace.root.history(run_id).unlink()
    # Last: a kill before this leaves a row without a directory, which a later observation removes.
    workspace.store.write(lambda transaction: transaction.remove([run_id]))
    return removal


def _leads_anywhere(directory: RunDir, listed: Listed) -> bool:
    """Whether a run directory is a link to something that is no run, such as one from an archive to a home directory.

    What is there is not removed, nor a lock created in it.
    """
    return listed.unreadable and directory.path.is_symlink()


def _remove(directory: RunDir, *, forget: bool, dry: bool = False) -> Removal:
    removal = remove_tree(directory.path, (lambda _: False) if forget else outlives_deletion, dry=dry)
    # A run's own copy of its code has links to everything that is no code.
    removal.links = [link for link in removal.links if not Path(link).is_relative_to(directory.code)]
    return removal


@contextlib.contextmanager
def _locked_now(directory: RunDir) -> Iterator[None]:
    """Hold a run's lock. Raises RunBusy if another command has it."""
    with locked(directory.lock, wait=False) as lock:
        if lock is None:
            raise RunBusy("another command is working on it; try again in a moment")
        yield


# --- what trackers have written of a run on this machine, wherever its plans had them write ---------------------------


def file_targets(workspace: Workspace, directory: RunDir) -> list[Target]:
    """The trackers that write files, with the settings of each plan that a run had; one that is damaged counts not.

    Args:
        workspace: where the run is.
        directory: its directory.
    """
    targets: dict[Any, Target] = {}
    for path in (directory.plan, *directory.submissions.glob("*/plan.json")):
        with contextlib.suppress(OSError, PathError):
            if (plan := read_plan(path)) is not None:
                targets |= {each.key: each for each in targets_of(workspace, plan) if writes_files(each.name)}
    return list(targets.values())


def remove_tracker_files(workspace: Workspace, run_id: str, targets: list[Target], *, dry: bool = False) -> Removal:
    """Remove what trackers have written of a run. Files that they did not write stay.

    Args:
        workspace: where the run is.
        run_id: the run.
        targets: the trackers.
        dry: remove nothing.
    """
    removal = Removal()
    for target in targets:
        files = files_of_tracker(target.name, target.settings, workspace.root, run_id)
        if not files.names:
            continue
        removed = remove_tree(files.directory, files.is_foreign, files.names, dry=dry)
        removed.trackers[target.name] = [str(files.directory / name) for name in files.names]
        removal.add(removed)
    return removal
