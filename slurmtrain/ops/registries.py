"""The registry of a runs root, made anew from the run directories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slurmtrain.errors import RegistryDamaged, RegistryUnusable
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.journal_lines import Garbage
    from slurmtrain.registry.ingest import ShowRuns


def rebuild(workspace: Workspace, show: ShowRuns = lambda _done, _total: None) -> Observed:
    """Read everything again; other commands see the old registry until the new one is complete.

    A damaged file is renamed to ``registry.db.damaged``, and one that is not a registry to ``registry.db.old``. A
    schema on a server is emptied if it is a registry of another version or runs root.

    Args:
        workspace: Where the runs are.
        show: Called with the number of runs read, and the total.
    """
    from slurmtrain.registry.store import Store

    address = workspace.config.registry
    try:
        # Unlike the workspace's own, which goes on in memory: here that would be a failure.
        workspace.store = Store(address)
        workspace.store.check()
        garbage = _replace_all(workspace, show)
    except RegistryUnusable as error:
        from slurmtrain.registry.store import put_registry_aside

        kept = put_registry_aside(address, "damaged" if isinstance(error, RegistryDamaged) else "old")
        if kept is not None and workspace.note is not None:
            workspace.note(f"{address} could not be used ({error.__cause__ or error}): it was kept as {kept}")
        workspace.store = Store(address)
        garbage = _replace_all(workspace, show)
    return replace(observe(workspace), garbage=garbage)


def _replace_all(workspace: Workspace, show: ShowRuns) -> list[tuple[str, Garbage]]:
    """Replace what the registry holds; returns what could not be read, with the ids of the runs."""
    from slurmtrain.registry.ingest import ingest_all

    runs = [workspace.root.run(run_id) for run_id in workspace.run_ids()]
    # In one transaction: others see the old rows until it ends, and a kill leaves them.
    with workspace.store.begin() as transaction:
        transaction.clear()
        return ingest_all(transaction, runs, show)
