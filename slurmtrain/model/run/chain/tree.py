"""Runs that start after others, as a tree. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def tree_order(above: Mapping[str, Collection[str]], first: Sequence[str]) -> dict[str, int]:
    """How deep each run of a set stands, in the order of a tree: each below the last of the runs that it starts after.

    Args:
        above: For each run of the set, the runs of the set that it starts after. Ids sort by age.
        first: Runs in the desired order of their chains; other chains come after these.
    """
    try:
        order = list(TopologicalSorter(above).static_order())
    except CycleError:
        # Nobody can submit such runs, but anything may stand in a journal.
        return dict.fromkeys([*first, *above], 0)
    depths: dict[str, int] = {}
    parents: dict[str, str] = {}
    for run_id in order:
        upper = max(above[run_id], key=lambda each: (depths[each], each), default=None)
        depths[run_id] = 0 if upper is None else depths[upper] + 1
        if upper is not None:
            parents[run_id] = upper
    below: dict[str, list[str]] = {}
    for run_id in sorted(parents):
        below.setdefault(parents[run_id], []).append(run_id)
    ordered: dict[str, int] = {}
    for run_id in [*first, *above]:
        root = run_id
        while root in parents:
            root = parents[root]
        stack = [root]
        while stack:
            each = stack.pop()
            if each not in ordered:
                ordered[each] = depths[each]
                stack += reversed(below.get(each, []))
    return ordered
