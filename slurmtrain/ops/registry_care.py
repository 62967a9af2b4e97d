"""Checking, repairing, copying and compacting the registry's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import RegistryNewer, RegistryUnusable, UserError
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.damage.repair import Repaired

ShowRuns = Callable[[int, int], None]
# So many runs are compared at a time.
_BATCH = 500
_MOST_DIFFERENCES = 20


def check(workspace: Workspace, *, deep: bool, show: ShowRuns) -> list[str]:
    """What is wrong with the registry, in sentences.

    Args:
        workspace: Whose registry.
        deep: Also read all run directories again, and compare.
        show: Called with the number of runs compared, and the total.

    Raises:
        UserError: It is on a server, or there is none.
        RegistryFailed: It cannot be read now; PathError.
    """
    from slurmtrain.registry.damage.repair import find_damage

    damage = find_damage(_file_of(workspace))
    return damage if damage or not deep else _differences(workspace, show)


def repair(workspace: Workspace, show: ShowRuns) -> Repaired:
    """Put a new registry in place of one that is damaged; of one that is not, nothing is changed.

    What trackers have is taken over as far as it can be read. Raises as :func:`check`.
    """
    from slurmtrain.registry.damage.repair import repair

    return repair(_file_of(workspace), [workspace.root.run(run_id) for run_id in workspace.run_ids()], show)


def back_up(workspace: Workspace, target: Path) -> int:
    """Copy the registry to a file that does not exist; returns its size in bytes. Raises as :func:`check`."""
    from slurmtrain.registry.sqlite import care

    return care.back_up(_file_of(workspace), target)


def vacuum(workspace: Workspace) -> tuple[int, int]:
    """Shrink the registry's file; returns its size in bytes before and after. Raises as :func:`check`."""
    from slurmtrain.registry.sqlite import care

    return care.vacuum(_file_of(workspace))


def _file_of(workspace: Workspace) -> Path:
    """The registry's file. Raises UserError if it is not in a file, or there is none."""
    address = workspace.config.registry
    if not isinstance(address, Path):
        raise UserError(f"the registry {address} is on a server, whose own tools do this: pg_amcheck, pg_dump, VACUUM")
    if not address.exists():
        raise UserError(f"there is no registry {address}; the next command that lists runs makes it")
    return address


def _differences(workspace: Workspace, show: ShowRuns) -> list[str]:
    """In what the registry differs from the run directories, except for runs that go on meanwhile."""
    from slurmtrain.registry.ingest import ingest
    from slurmtrain.registry.store import Store

    try:
        store = Store(workspace.config.registry)
    except RegistryNewer:
        raise
    except RegistryUnusable as error:
        return [str(error)]
    workspace.store = store
    observe(workspace, thorough=True, ask_slurm=False)
    differences: list[str] = []
    ids = workspace.run_ids()
    for first in range(0, len(ids), _BATCH):
        show(first, len(ids))
        batch = ids[first : first + _BATCH]
        with Store.in_memory_only() as fresh:
            with fresh.begin() as transaction:
                ingest(transaction, [workspace.root.run(run_id) for run_id in batch], dead=False)
            stored, read = store.load_all(batch), fresh.load_all(batch)
            offsets, now = store.offsets(batch), fresh.offsets(batch)
        differences += [
            f"run {run_id} is not stored as its directory has it"
            for run_id in batch
            if offsets.get(run_id) == now.get(run_id) and stored.get(run_id) != read.get(run_id)
        ]
    show(len(ids), len(ids))
    return differences[:_MOST_DIFFERENCES]
