"""Making the registry anew from the run directories."""

from __future__ import annotations

from dataclasses import replace

from slurmtrain.ops.observe import Observed, observe
from slurmtrain.ops.workspace import Workspace


def rebuild(workspace: Workspace) -> Observed:
    """Read everything into a new registry, then put it in the old one's place, which is kept as ``registry.db.old``."""
    path = workspace.config.registry
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    aside = Workspace(replace(workspace.config, registry=fresh))
    observed = observe(aside)
    aside.store.close()
    if path.exists():
        path.replace(path.with_name(f"{path.name}.old"))
    fresh.replace(path)
    return observed
