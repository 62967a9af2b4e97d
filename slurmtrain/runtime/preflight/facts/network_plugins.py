"""Checks from other packages: entry points of the group ``slurmtrain.checks``.

An entry point is a callable that gets a :class:`CheckedNode` and returns ``(status, summary)`` or
``(status, summary, evidence)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from slurmtrain.model.preflight.finding import STATUSES

GROUP = "slurmtrain.checks"
# Characters: a summary is one cell of a table.
_SUMMARY_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """What a plug-in receives.

    Attributes:
        index: The node's number, from 0.
        nodes: How many nodes the attempt has.
        host: The node's name.
        executor: local or slurm.
        run_dir: The run's directory.
        params: A copy of the spec's parameters.
        gpus_per_node: How many GPUs of a node the job has.
    """

    index: int
    nodes: int
    host: str
    executor: str
    run_dir: Path
    params: Mapping[str, Any]
    gpus_per_node: int


def find_plugins(
    levels: Mapping[str, str], reserved: Collection[str]
) -> tuple[dict[str, EntryPoint], dict[str, dict[str, Any]], str]:
    """Find the plug-ins of this node that are not off; nothing is loaded yet.

    Args:
        levels: The spec's levels, by name.
        reserved: Names that no plug-in may have: the names of slurmtrain's own checks.

    Returns:
        Entry points by name; facts with the error of unusable ones; and a description of names that clash.
    """
    offered: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        if levels.get(point.name) != "off":
            offered.setdefault(point.name, []).append(point)
    facts: dict[str, dict[str, Any]] = {
        name: {"error": f"no such entry point of the group {GROUP!r}"}
        for name, level in levels.items()
        if level != "off" and name not in offered
    }
    clashes = []
    for name, points in offered.items():
        packages = ", ".join(sorted({_package(point) for point in points}))
        # Reported under the name "plugins": the check of this name is slurmtrain's own, and runs as usual.
        if name in reserved:
            clashes.append(f"the entry point {name!r} of {packages} has the name of a check of slurmtrain's own")
        elif len(points) > 1:
            facts[name] = {"error": f"several packages have a check of this name: {packages}"}
    usable = {name: points[0] for name, points in offered.items() if name not in reserved and len(points) == 1}
    return usable, facts, "; ".join(clashes)


def run_plugin(point: EntryPoint, node: CheckedNode) -> dict[str, Any]:
    """Load a plug-in and run its check on a node; returns ``status``, ``summary`` and ``evidence``.

    Raises TypeError or ValueError if it returns something else, and whatever it raises itself.
    """
    check: Callable[[CheckedNode], object] = point.load()
    returned = check(node)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TypeError(f"{point.value} returned {returned!r:.100}, not (status, summary[, evidence])")
    status, summary, evidence = (*returned, {}) if len(returned) == 2 else returned
    if status not in STATUSES:
        raise ValueError(f"{point.value} returned the status {status!r:.100}; use one of {', '.join(STATUSES)}")
    if not isinstance(summary, str) or not isinstance(evidence, Mapping):
        raise TypeError(f"{point.value} returned a summary that is not text, or evidence that is not a mapping")
    # Converted to JSON and back, as in the journal: what JSON cannot hold raises here, where the plug-in is known.
    plain = json.loads(json.dumps(dict(evidence), allow_nan=False))
    return {"status": status, "summary": " ".join(summary.split())[:_SUMMARY_LIMIT], "evidence": plain}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
