"""The runs of other users of a runs root: read to be shown, and for nothing else.

Their files may say anything. No action follows from their contents, nothing is written to their directories, and
nothing of them enters this user's registry. Each of their files must belong to the account whose directory it is in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import RunUnreadable, UntrustedPath
from slurmtrain.model.run.layout import RunsRoot, is_run_id
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.rows import RUNS, Listed, run_row
from slurmtrain.runtime.job.run_reader import read_run_of
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import check_owned, open_directory, user_name

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Attempt, Run
    from slurmtrain.system.owned_files import Check

# The journals of a run take some kilobytes for each attempt. More than this would only keep the command busy.
_MOST_JOURNAL_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Colleague:
    """Somebody else with a directory in the shared root."""

    name: str
    uid: int
    root: RunsRoot

    @property
    def check(self) -> Check:
        """What their files must pass: to be theirs, and writable for nobody else."""
        return partial(check_owned, owner=self.uid)


def runs_of_colleagues(workspace: Workspace) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs of all others who share the root of ``workspace``, oldest first for each of them.

    Returns:
        RUN of the JSON contract, with ``user``; and notes on what cannot be read.
    """
    runs: list[dict[str, Any]] = []
    notes: list[str] = []
    for colleague, read in _runs_of_others(workspace, notes):
        theirs = Workspace(replace(workspace.config, runs=colleague.root.path))
        row = run_row(read, settled=False, scanned=(), revision=0)
        listed = Listed(dict(zip(RUNS.columns, row, strict=True)))
        runs.append({"user": colleague.name, **run_json(theirs, listed)})
    return runs, notes


def attempts_of_colleagues(workspace: Workspace) -> dict[str, Sequence[Attempt]]:
    """The attempts of the runs of all others who share the root of ``workspace``, by the run's id."""
    return {read.id: read.attempts for _, read in _runs_of_others(workspace, [])}


def _runs_of_others(workspace: Workspace, notes: list[str]) -> Iterator[tuple[Colleague, Run]]:
    """The runs of all others, oldest first for each of them. ``notes`` receives what cannot be read."""
    for colleague in _colleagues(workspace, notes):
        try:
            handle = open_directory(colleague.root.path, check=colleague.check)
            try:
                names = os.listdir(handle)
            finally:
                os.close(handle)
        except (UntrustedPath, OSError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else str(error)
            notes.append(f"the runs of {colleague.name} cannot be read: {why}")
            continue
        for run in map(colleague.root.run, filter(is_run_id, sorted(names))):
            try:
                yield colleague, read_run_of(run, colleague.check, _MOST_JOURNAL_BYTES)
            except RunUnreadable as error:
                notes.append(f"run {run.id} of {colleague.name} cannot be read: {error}")


def _colleagues(workspace: Workspace, notes: list[str]) -> Iterator[Colleague]:
    shared_root = workspace.config.shared_root
    assert shared_root is not None
    try:
        entries = sorted(os.scandir(shared_root), key=lambda entry: entry.name)
    except OSError as error:
        notes.append(f"the runs root {shared_root} cannot be read: {describe_os_error(error)}")
        return
    for entry in entries:
        is_directory = False
        with contextlib.suppress(OSError):
            is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") or Path(entry.path) == workspace.root.path or not is_directory:
            continue
        uid = entry.stat(follow_symlinks=False).st_uid
        # Whoever may write to this root can create a directory with another person's name.
        if user_name(uid) == entry.name:
            yield Colleague(entry.name, uid, RunsRoot(Path(entry.path)))
        else:
            notes.append(f"{entry.path} is not shown: it belongs to {user_name(uid)} but is named after somebody else")
