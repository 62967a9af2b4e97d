"""Copying the registry to another database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.config import registry_address
from slurmtrain.errors import UserError
from slurmtrain.model.urls import is_url, read_database_url
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.urls import DatabaseUrl


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

    places = [_address(each, workspace.config.runs, cwd) for each in (source, target)]
    if places[0] == places[1]:
        raise UserError(f"{places[0]} cannot be copied to itself")
    return Copied(str(places[0]), str(places[1]), copy_rows(*places))


def _address(text: str, runs: Path, cwd: Path) -> Path | DatabaseUrl:
    """Where a registry is. Raises UserError for an address that is wrong, or that shows a password to others."""
    if not is_url(text):
        return registry_address(str(cwd / text), runs)
    try:
        url = read_database_url(text)
    except ValueError as error:
        raise UserError(f"the address of a registry {error}") from None
    if url.password is not None:
        raise UserError(
            f"the address {url} was given with a password, which everybody on this machine can see in a command line: "
            "keep it in ~/.pgpass, and change it"
        )
    return registry_address(url, runs)
