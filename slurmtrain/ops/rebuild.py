"""Rebuilding the registry from the run directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import RegistryDamaged, RegistryUnusable
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.journal import Garbage
    from slurmtrain.registry.parallel_ingest import ShowRuns


def rebuild(workspace: Workspace, show: ShowRuns = lambda _done, _total: None) -> Observed:
    """Read everything again; other commands see the old registry until the new one is complete.

    A file that is damaged is repaired; one that is not a registry is moved aside, with its journal, as
    ``registry.db.old``. A schema on a server is emptied if it is a registry of another version or runs root.

    Args:
        workspace: Where the runs are.
        show: Called with the number of runs read, and the total.
    """
    from slurmtrain.registry.store import Store

    address = workspace.config.registry
    try:
        # Unlike the workspace's own, which goes on in memory: here that would be a failure.
        workspace.store = Store(address)
        garbage = _read_again(workspace, show)
    except RegistryUnusable as error:
        if not (isinstance(error, RegistryDamaged) and isinstance(address, Path) and _repair(workspace, address, show)):
            from slurmtrain.registry.database import put_aside

            put_aside(address)
        workspace.store = Store(address)
        return observe(workspace)
    return replace(observe(workspace), garbage=garbage)


def _repair(workspace: Workspace, path: Path, show: ShowRuns) -> bool:
    """Whether a damaged file was replaced."""
    from slurmtrain.registry.damage.repair import repair

    runs = [workspace.root.run(run_id) for run_id in workspace.run_ids()]
    return repair(path, runs, show).kept is not None


def _read_again(workspace: Workspace, show: ShowRuns) -> list[tuple[str, Garbage]]:
    """Replace what the registry holds; returns what could not be read, with the ids of the runs."""
    from slurmtrain.registry.parallel_ingest import ingest_all

    runs = [workspace.root.run(run_id) for run_id in workspace.run_ids()]
    with workspace.store.begin() as transaction:
        transaction.clear()
        return ingest_all(transaction, runs, show)
