"""Runs as lines of comma-separated values (RFC 4180)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.cli.shared import output
from slurmtrain.model.query.fields import flattened, value_of
from slurmtrain.model.written import plain_numbers

# What there is of each run, before its parameters and metrics.
_FIELDS = (
    "id", "name", "state", "cause", "reason", "sweep", "tags", "attempt", "executor", "job_id", "nodes", "submitted_at",
    "started_at", "ended_at", "step", "total_steps", "lost_steps", "goodput",
)  # fmt: skip
# What follows them, and what comes last.
_SECTIONS, _LAST = ("params", "metrics"), ("git.commit", "git.dirty", "mlflow_run_id", "dir")


def print_csv(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print a line of names, and a line for each run.

    Args:
        runs: RUN of the JSON.
        names: The fields to print; empty: the usual ones, all parameters and all metrics.
    """
    names = names or _usual_fields(runs)
    output.print_csv([names, *([_cell(value_of(run, name)) for name in names] for run in runs)])


def _usual_fields(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    users = ["user"] if any("user" in run for run in runs) else []
    inner = {
        f"{section}.{name}": None for section in _SECTIONS for run in runs for name, _ in flattened(run[section] or {})
    }
    return [*users, *_FIELDS, *inner, *_LAST]


def _cell(value: Any) -> Any:
    """Text as it is, nothing for null, lists separated by blanks, everything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    # For programs, which may not know all forms of numbers that people write.
    value = plain_numbers(value)
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else json.dumps(value)
