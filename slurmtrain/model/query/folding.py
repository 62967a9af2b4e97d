"""The runs of a sweep as one line of a list. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.query.differing import differing
from slurmtrain.model.query.direction import is_larger_better
from slurmtrain.model.query.fields import flattened

# States in the order of counting: first the states that somebody may have to look at.
_STATES = ("unreadable", "failed", "lost", "running", "requeued", "pending", "created", "cancelled", "completed")
# What a line of several runs does not have.
_EMPTY: Mapping[str, None] = dict.fromkeys(
    ("step", "total_steps", "eta_seconds", "steps_per_second", "checkpoint")
)  # fmt: skip


def fold_sweep(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a list shows of a sweep, under the names of the fields of a run.

    Its id and common name, how many of its runs are in each state, the parameters that all of them share, and the best
    value of each metric whose name shows what is better.

    Args:
        runs: RUN of the JSON of each.
    """
    names = list(dict.fromkeys(run["name"] for run in runs))
    varying = differing([run["params"] for run in runs])
    shared = {name: value for name, value in flattened(runs[0]["params"]) if name not in set(varying)}
    sweep = runs[0]["sweep"]
    return {
        **_EMPTY,
        "id": sweep,
        "name": names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        "state": count_states([run["state"] for run in runs]),
        "params": shared,
        "submitted_at": min((run["submitted_at"] for run in runs if run["submitted_at"]), default=None),
        "metrics": best_metrics([run["metrics"] for run in runs]),
        "reason": f"{len(runs)} runs; 'slurmtrain status {sweep}' lists them",
    }


def describe_sweep(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many runs of a sweep are in each state, and its best values: a line below a list of them.

    Args:
        runs: RUN of the JSON of each.
    """
    best = best_metrics([run["metrics"] for run in runs])
    values = ", ".join(f"{name}={value:.6g}" for name, value in best.items())
    states = count_states([run["state"] for run in runs])
    return f"sweep {runs[0]['sweep']}: {states}" + (f"; best {values}" if values else "")


def count_states(states: Sequence[str]) -> str:
    """How many there are of each of these states, such as ``2 failed, 5 running``."""
    counts = Counter(states)
    ordered = sorted(counts, key=lambda state: _STATES.index(state) if state in _STATES else -1)
    return ", ".join(f"{counts[state]} {state}" for state in ordered)


def best_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best value of each metric, without metrics whose name does not show whether larger or smaller is better.

    Args:
        metrics: The newest values of each run.
    """
    values: dict[str, list[float]] = {}
    for of_run in metrics:
        for name, value in of_run.items():
            if isinstance(value, int | float) and not math.isnan(value):
                values.setdefault(name, []).append(value)
    best = {}
    for name, numbers in values.items():
        larger = is_larger_better(name)
        if larger is not None:
            best[name] = max(numbers) if larger else min(numbers)
    return best
