"""Making the registry anew from the run directories."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from slurmtrain.ops.observe import Observed, observe
from slurmtrain.ops.workspace import Workspace
from slurmtrain.system.files import locked, make_directory


def rebuild(workspace: Workspace) -> Observed:
    """Read everything into a new registry, then put it in the old one's place, which is kept as ``registry.db.old``."""
    path = workspace.config.registry
    fresh = path.with_name(f"{path.name}.new")
    make_directory(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        _remove(fresh)
        aside = Workspace(replace(workspace.config, registry=fresh))
        observed = observe(aside)
        aside.store.close()
        _rename(path, path.with_name(f"{path.name}.old"))
        _rename(fresh, path)
        path.with_name(f".{fresh.name}.lock").unlink(missing_ok=True)
    return observed


def _rename(old: Path, new: Path) -> None:
    """Rename a database with the journal that a killed writer may have left, which belongs to it and to no other."""
    _remove(new)
    for suffix in ("-journal", ""):
        with contextlib.suppress(FileNotFoundError):
            old.with_name(old.name + suffix).replace(new.with_name(new.name + suffix))


def _remove(path: Path) -> None:
    for suffix in ("", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
