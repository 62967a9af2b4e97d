"""Runs as lists show them: the registry's rows, decoded only as far as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.run import ENDED, UNREADABLE
from slurmtrain.model.written import remembering
from slurmtrain.registry.cells import decode_as, read_cell, read_checkpoint

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Checkpoint, Live


@dataclass(frozen=True, slots=True)
class Listed:
    """A run as lists show it. ``row`` is the registry's; its JSON is decoded only when it is accessed.

    ``live`` is what the scheduler reports right now, which is not stored. ``mirrored``: whether trackers have all that
    they can be sent of it; None: none is to have it, or that is unknown.
    """

    row: Mapping[str, Any]
    live: Live | None = None
    mirrored: bool | None = None
    trackers: Sequence[Mapping[str, Any]] = ()
    """The rows of what trackers have of it."""

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.row["id"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.row["name"])

    @property
    def ended(self) -> bool:
        """Whether it has ended; it may still be started again."""
        return self.state in ENDED

    @property
    def unreadable(self) -> bool:
        """Whether its journals cannot be read."""
        return self.state == UNREADABLE

    @property
    def state(self) -> str:
        """Its state, one of ``RUN_STATES``."""
        return str(self.row["state"])

    @property
    def reason(self) -> str:
        """Why it is in this state, in a sentence; may be empty."""
        return str(self.row["reason"])

    @property
    def settled(self) -> bool:
        """Whether it has ended and no process can still write to it."""
        return bool(self.row["settled"])

    @property
    def revision(self) -> int:
        """How many bytes of its files have been read; grows with every new fact."""
        return int(self.row["revision"])

    @property
    def job_id(self) -> str | None:
        """The job id of the newest attempt."""
        return None if self.row["job_id"] is None else str(self.row["job_id"])

    @property
    def attempt(self) -> int:
        """The number of the newest attempt; 0 if there is none."""
        return int(self.row["attempt"])

    @property
    def metrics(self) -> dict[str, float]:
        """The latest values, by name."""
        return decode_cell(self.row["metrics"], "Mapping[str, float]") or {}

    @property
    def params(self) -> dict[str, Any]:
        """The spec's ``params`` in its newest attempt, whose numbers remember how they were written."""
        params = decode_cell(self.row["params"], "Mapping[str, Any]") or {}
        return read_cell(lambda rows: remembering(params, rows), decode_cell(self.row["written"], "Sequence[Any]"))

    @property
    def resources(self) -> dict[str, Any]:
        """The spec's ``resources`` in its newest attempt."""
        return decode_cell(self.row["resources"], "Mapping[str, Any]") or {}

    @property
    def sweep(self) -> str | None:
        """The id of its sweep; None for a single run."""
        return None if self.row["sweep"] is None else str(self.row["sweep"])

    @property
    def parents(self) -> list[dict[str, Any]]:
        """The runs that it comes from."""
        return decode_cell(self.row["parents"], "Sequence[Mapping[str, Any]]") or []

    @property
    def tags(self) -> list[str]:
        """What people have tagged it with."""
        return decode_cell(self.row["tags"], "Sequence[str]") or []

    @property
    def nodes(self) -> list[str]:
        """The hosts of the newest attempt, in the order of their ranks."""
        return decode_cell(self.row["nodes"], "Sequence[str]") or []

    @property
    def git(self) -> dict[str, Any] | None:
        """What is known about the repository that the run was submitted from."""
        git: dict[str, Any] | None = decode_cell(self.row["git"], "Mapping[str, Any]")
        return git

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint from which the run can start."""
        return read_cell(read_checkpoint, self.row["checkpoint"])


def decode_cell(cell: str | None, annotation: str) -> Any:
    """What a cell holds, of the shape of an ``annotation``. Raises RegistryDamaged."""
    return read_cell(lambda text: decode_as(text, annotation), cell)


def is_mirrored(row: Mapping[str, Any], sent: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether trackers have all that they can be sent of a run; None: none is to have it, or that is unknown.

    Args:
        row: The run's.
        sent: What its trackers have: the rows.
    """
    if not row["attempt"] or row["tracked"] is False or (row["tracked"] is None and not sent):
        return None
    return bool(sent) and all(each["revision"] == row["revision"] for each in sent)
