"""All runs that one comes from, and that come from it, over several generations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.chain.tree import tree_order
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.choice.listed import Listed

# How many runs are listed.
_MOST_RUNS = 100


def lineage_json(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The family of a run in the order of a tree, as ``show --json`` has it; empty if it has none.

    Each has its ``depth``, and in ``parents`` how it comes from others; if there are too many, only the nearest are
    there.

    Args:
        workspace: Where the runs are.
        run_id: The run.
    """
    family = _family(workspace, run_id)
    if len(family) < 2:
        return []
    above = {
        each: [parent["run"] for parent in _parents(run) if parent["run"] in family] for each, run in family.items()
    }
    return [_facts(each, family[each], depth) for each, depth in tree_order(above, [run_id]).items()]


def _family(workspace: Workspace, run_id: str) -> dict[str, Listed | None]:
    """A run and all related to it, at most a hundred; None for a run that is not known any more."""
    family: dict[str, Listed | None] = {}
    queue = [run_id]
    while queue:
        listed = workspace.store.listed(queue)
        family |= {each: listed.get(each) for each in queue}
        related: dict[str, None] = {}
        for each in queue:
            related |= dict.fromkeys(parent["run"] for parent in _parents(family[each]))
            related |= dict.fromkeys(workspace.store.children(each))
        queue = [each for each in related if each not in family][: max(0, _MOST_RUNS - len(family))]
    return family


def _parents(listed: Listed | None) -> list[dict[str, Any]]:
    return [] if listed is None else [parent for parent in listed.parents if isinstance(parent.get("run"), str)]


def _facts(run_id: str, listed: Listed | None, depth: int) -> dict[str, Any]:
    facts = {"name": None, "state": None} if listed is None else {"name": listed.name, "state": listed.state}
    return {"id": run_id, **facts, "depth": depth, "parents": _parents(listed)}
