"""Reading the plan of a run, or of one of its submissions, from its file."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.spec.plan import Plan
from slurmtrain.system.files import read_json


def read_plan(path: Path) -> Plan | None:
    """The plan in this file; None if there is no such file. Raises PathError if it cannot be read."""
    data = read_json(path)
    if data is None:
        return None
    try:
        return Plan.from_json(data)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PathError(f"the plan at {path} cannot be read: {error}") from error
