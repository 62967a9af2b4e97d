"""Lineage: which runs a run comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RERUN, FORK, AFTER = "rerun", "fork", "after"


@dataclass(frozen=True, slots=True)
class Parent:
    """A run that another one comes from.

    ``run``: its id. ``relation``: ``rerun``, the same was submitted again; ``fork``, training begins with its
    checkpoint; or ``after``, it has to end first. ``step``: step of the checkpoint; None without one.
    """

    run: str
    relation: str
    step: int | None = None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Parent:
        """Read the result of :meth:`to_dict`."""
        return cls(record["run"], record["relation"], record.get("step"))

    def to_dict(self) -> dict[str, Any]:
        """This as events and JSON have it."""
        return {"run": self.run, "relation": self.relation, "step": self.step}

    @property
    def phrase(self) -> str:
        """What the child is: ``rerun of RUN``, ``fork of RUN at step N``."""
        step = "" if self.step is None else f" at step {self.step}"
        return f"after {self.run}" if self.relation == AFTER else f"{self.relation} of {self.run}{step}"
