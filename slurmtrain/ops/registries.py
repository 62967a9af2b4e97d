"""The registry of a runs root: made anew from the run directories, and copied to another database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.config import registry_address
from slurmtrain.errors import RegistryDamaged, RegistryUnusable, UserError
from slurmtrain.model.urls import is_url, read_database_url
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.journal_lines import Garbage
    from slurmtrain.model.urls import DatabaseUrl
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
            workspace.note(f"{address} could not be used ({error.__cause__ or error}): it is kept as {kept}")
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


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied. ``rows``: the number of rows of each table; addresses have no passwords."""

    source: str
    target: str
    rows: Mapping[str, int]


def copy_registry(workspace: Workspace, source: str, target: str, cwd: Path) -> Copied:
    """Copy a registry of the workspace's runs, verified; what runs the target had must be in it.

    Args:
        workspace: Whose runs they are.
        source: A file or URL.
        target: Another one.
        cwd: The directory that paths of files are relative to.

    Raises:
        UserError: Both are the same, or one cannot be used; what registry.store.copy_rows raises.
    """
    from slurmtrain.registry.store import copy_rows

    places: list[Path | DatabaseUrl] = []
    for text in (source, target):
        if not is_url(text):
            places.append(registry_address(str(cwd / text), workspace.config.runs))
            continue
        try:
            url = read_database_url(text)
        except ValueError as error:
            raise UserError(f"the address of a registry {error}") from None
        if url.password is not None:
            raise UserError(
                f"the address {url} was given with a password, which everybody on this machine can see in a command "
                "line: keep it in ~/.pgpass, and change it"
            )
        places.append(registry_address(url, workspace.config.runs))
    if places[0] == places[1]:
        raise UserError(f"{places[0]} cannot be copied to itself")
    return Copied(str(places[0]), str(places[1]), copy_rows(*places))
