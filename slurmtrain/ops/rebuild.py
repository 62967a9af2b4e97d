"""Rebuilding the registry from the run directories."""

from __future__ import annotations

import contextlib

from slurmtrain.errors import RegistryUnusable
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import locked


def rebuild(workspace: Workspace) -> Observed:
    """Read everything again; other commands see the old registry until the new one is complete.

    A file that is not a registry of this version is moved aside, with its journal, as ``registry.db.old``.
    """
    path = workspace.config.registry
    try:
        store = workspace.store
    except RegistryUnusable:
        with locked(path.with_name(f".{path.name}.lock")):
            for suffix in ("-journal", ""):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).replace(path.with_name(f"{path.name}.old{suffix}"))
        return observe(workspace)
    from slurmtrain.registry.ingest import ingest

    runs = [workspace.root.run(run_id) for run_id in workspace.run_ids()]
    with store.begin() as transaction:
        transaction.clear()
        ingested = ingest(transaction, runs, dead=False)
    garbage = [(each.run.id, line) for each in ingested for line in each.garbage]
    return Observed(observe(workspace).runs, garbage)
