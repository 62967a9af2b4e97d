"""What a search was submitted with, in ``searches/`` of the runs root, until all of its trials have been asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.sweep_values import SearchSpec
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error, make_directory, read_json, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search.

    ``sweep``: the id of its sweep. ``executor``: ``slurm`` or ``local``. ``plan``: plan of its runs, with examples of
    the values that are searched. ``overrides``: from the command line. ``text``: the spec, without secrets.
    ``spec_file``: its path, if it has one. ``host``: the machine of a search whose runs are local; None: any.
    """

    sweep: str
    search: SearchSpec
    executor: str
    plan: Plan
    overrides: Sequence[str]
    text: str
    spec_file: str | None
    host: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "schema": 1,
            "sweep": self.sweep,
            "search": self.search.to_dict(),
            "executor": self.executor,
            "plan": self.plan.to_json(),
            "overrides": list(self.overrides),
            "text": self.text,
            "spec_file": self.spec_file,
            "host": self.host,
        }


def under_way(workspace: Workspace) -> list[str]:
    """The ids of the sweeps that search, in order of submission."""
    try:
        return sorted(path.stem for path in workspace.root.searches.iterdir() if path.suffix == ".json")
    except OSError:
        return []


def lock_of(workspace: Workspace, sweep: str) -> Path:
    """Held while the trials of a search are read, ended or asked for."""
    return workspace.root.searches / f"{sweep}.lock"


def store(workspace: Workspace, record: SearchRecord) -> None:
    """Write a record. Raises PathError."""
    try:
        make_directory(workspace.root.searches)
        write_json(_path(workspace, record.sweep), record.to_dict())
    except OSError as error:
        raise PathError(f"cannot write to {workspace.root.searches}: {describe_os_error(error)}") from error


def read(workspace: Workspace, sweep: str) -> SearchRecord | None:
    """The record of a search; None if it is over. Raises PathError if it cannot be read."""
    path = _path(workspace, sweep)
    data = read_json(path)
    if data is None:
        return None
    try:
        return SearchRecord(
            sweep=sweep,
            search=SearchSpec.from_dict(data["search"]),
            executor=str(data["executor"]),
            plan=Plan.from_json(data["plan"]),
            overrides=tuple(map(str, data["overrides"])),
            text=str(data["text"]),
            spec_file=data["spec_file"],
            host=data.get("host"),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise PathError(f"{path} is not the record of a search ({error}); without it, the search is over") from error


def forget(workspace: Workspace, sweep: str) -> None:
    """Remove a record: nothing is asked any more. The caller holds the search's lock.

    Its file goes too: whoever has opened it and gets the lock finds no record, and does nothing.
    """
    with contextlib.suppress(OSError):
        _path(workspace, sweep).unlink(missing_ok=True)
        lock_of(workspace, sweep).unlink(missing_ok=True)


def _path(workspace: Workspace, sweep: str) -> Path:
    return workspace.root.searches / f"{sweep}.json"
