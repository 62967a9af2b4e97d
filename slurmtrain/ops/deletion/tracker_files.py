"""What trackers have written of a run on this machine, wherever its plans had them write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.deletion.tree_removal import Removal, remove_entries
from slurmtrain.ops.shared.trackers import Target, targets_of
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.tracking.tracker_plugins import files_of_tracker, writes_files


def file_targets(workspace: Workspace, directory: RunDir) -> list[Target]:
    """The trackers that write files, with the settings of each plan that a run had; one that is damaged counts not.

    Args:
        workspace: where the run is.
        directory: its directory.
    """
    targets = {
        target.key: target
        for plan in _plans(directory)
        for target in targets_of(workspace, plan)
        if writes_files(target.name)
    }
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
        removed = remove_entries(files.directory, files.names, files.is_foreign, dry=dry)
        removed.trackers[target.name] = [str(files.directory / name) for name in files.names]
        removal.add(removed)
    return removal


def _plans(directory: RunDir) -> Iterator[Plan]:
    for path in (directory.plan, *directory.submissions.glob("*/plan.json")):
        with contextlib.suppress(OSError, PathError):
            if (plan := read_plan(path)) is not None:
                yield plan
