"""What people see of runs that start after others, or come from them: chains and families, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.lineage import AFTER, UPSTREAM, describe_failure, describe_wait, tree_order
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.start_order import dependents, upstreams_of
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# How many runs of a chain, or of a family, are listed.
_MOST_RUNS = 100
# The states of a run that may wait for others.
WAITING = frozenset({"created", "pending", "requeued"})


def describe_waits(workspace: Workspace, listed: Listed) -> str:
    """What a run waits for, such as ``after pretrain (running, step 120)``, or why it never starts; empty if it may."""
    if not _waits_for_runs(workspace, listed):
        return ""
    from slurmtrain.model.query.comparison import count_states

    upstreams = upstreams_of(workspace.root.run(listed.id))
    runs = workspace.store.listed([upstream.run for upstream in upstreams])
    for each in upstreams:
        listed_upstream = runs.get(each.run)
        if listed_upstream is None and not each.any:
            return f"cannot start: the directory of run {each} was deleted"
        if listed_upstream and listed_upstream.ended and listed_upstream.state != "completed" and not each.any:
            return f"cannot start: {describe_failure(each, listed_upstream.state, listed_upstream.reason)}"
    waits: dict[str, list[Listed]] = {}
    for each in upstreams:
        if each.run in runs and not runs[each.run].ended:
            waits.setdefault(each.name, []).append(runs[each.run])
    phrases = [
        # A run knows those that it waits for by a name, which may be a sweep's.
        describe_wait(name, of_name[0].state, of_name[0].row["step"])
        if len(of_name) == 1
        else f"after {name} ({count_states([run.state for run in of_name])})"
        for name, of_name in waits.items()
    ]
    return ", ".join(phrases[:3]) + (f" and {len(phrases) - 3} more" if len(phrases) > 3 else "")


def _waits_for_runs(workspace: Workspace, listed: Listed) -> bool:
    """Whether a run starts after others, and has not begun."""
    if listed.state not in WAITING or not any(parent.get("relation") == AFTER for parent in listed.parents):
        return False
    return not workspace.root.run(listed.id).upstream_facts.exists()


def chain_json(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """The runs that one starts after, and the runs that start after it, as ``show --json`` has them."""
    directory = workspace.root.run(run_id)
    upstreams = upstreams_of(directory)
    after = dependents(workspace, [run_id])
    if not upstreams and not after:
        return {"after": [], "before": [], "chain": []}
    tree = tree_order(chains_of(workspace, [run_id], _MOST_RUNS), [run_id])
    runs = observe(workspace, [*(upstream.run for upstream in upstreams), *after, *tree], ask_slurm=False).runs
    return {
        "after": [
            {**_chain_facts(runs.fetch([each.run]), each.run), "condition": "afterany" if each.any else "afterok"}
            for each in upstreams
        ],
        "before": [_chain_facts(runs.fetch([each]), each) for each in after],
        "chain": [{**_chain_facts(runs.fetch([each]), each), "depth": depth} for each, depth in tree.items()],
    }


def chains_of(workspace: Workspace, run_ids: Sequence[str], most: int | None = None) -> dict[str, list[str]]:
    """For these runs, all before and after them, and all before and after these: the runs that each starts after.

    Args:
        workspace: Where they are.
        run_ids: The runs.
        most: The greatest number of runs; None: all. Runs that are left out stand nowhere in the result.
    """
    above: dict[str, list[str]] = {}
    queue = list(run_ids)[:most]
    while queue:
        above |= {run_id: [each.run for each in upstreams_of(workspace.root.run(run_id))] for run_id in queue}
        related = dict.fromkeys([*(each for run_id in queue for each in above[run_id]), *dependents(workspace, queue)])
        queue = [run_id for run_id in related if run_id not in above]
        queue = queue if most is None else queue[: max(0, most - len(above))]
    return {run_id: [each for each in upper if each in above] for run_id, upper in above.items()}


def _chain_facts(runs: Mapping[str, Listed], run_id: str) -> dict[str, Any]:
    listed = runs.get(run_id)
    if listed is None:
        return {"id": run_id, "name": None, "state": None, "step": None}
    return {"id": run_id, "name": listed.name, "state": listed.state, "step": listed.row["step"]}


def open_dependents(workspace: Workspace, observed: Observed, run_ids: Sequence[str]) -> list[str]:
    """The runs that have not ended and start after any of these, directly or in turn.

    Args:
        workspace: Where they are.
        observed: The runs as observed.
        run_ids: The runs.
    """
    queue, following = list(run_ids), dict.fromkeys(run_ids)
    while queue:
        queue = [each for each in dependents(workspace, queue) if each not in following]
        following |= dict.fromkeys(queue)
    listed = observed.runs.fetch(each for each in following if each not in run_ids)
    return [run_id for run_id, run in listed.items() if not run.ended]


def open_upstreams(workspace: Workspace, runs: Mapping[str, Listed]) -> list[str]:
    """The runs that any of these still waits for, and the runs that these wait for in turn.

    Args:
        workspace: Where they are.
        runs: The runs by id, as observed.
    """
    queue: Mapping[str, Listed] = runs
    above: dict[str, Listed] = {}
    while waiting := [run for run in queue.values() if _waits_for_runs(workspace, run)]:
        ids = {each.run for run in waiting for each in upstreams_of(workspace.root.run(run.id))}
        queue = workspace.store.listed(ids - above.keys() - runs.keys())
        above |= queue
    return [run_id for run_id, run in above.items() if not run.ended]


def describe_blocked(workspace: Workspace, run_ids: Sequence[str]) -> Iterator[str]:
    """A line for each of these runs that has ended because one that it waited for did."""
    if run_ids:
        for run_id, listed in observe(workspace, run_ids, ask_slurm=False).runs.fetch(run_ids).items():
            if listed.row["cause"] == UPSTREAM:
                yield f"run {run_id} is {listed.state}: {listed.reason}"


# --- lineage ---------------------------------------------------------------------------------------------------------


def lineage_json(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The family of a run in the order of a tree, as ``show --json`` has it; empty if it has none.

    Each has its ``depth``, and in ``parents`` how it comes from others; if there are too many, only the nearest are
    there.

    Args:
        workspace: Where the runs are.
        run_id: The run.
    """
    # At most so many, the nearest first; None for a run that is not known any more.
    family: dict[str, Listed | None] = {}
    queue = [run_id]
    while queue:
        listed = workspace.store.listed(queue)
        family |= {each: listed.get(each) for each in queue}
        related: dict[str, None] = {}
        for each in queue:
            related |= dict.fromkeys(parent["run"] for parent in _known_parents(family[each]))
            related |= dict.fromkeys(workspace.store.children(each))
        queue = [each for each in related if each not in family][: max(0, _MOST_RUNS - len(family))]
    if len(family) < 2:
        return []
    above = {
        each: [parent["run"] for parent in _known_parents(run) if parent["run"] in family]
        for each, run in family.items()
    }
    return [
        {
            "id": each,
            "name": None if run is None else run.name,
            "state": None if run is None else run.state,
            "depth": depth,
            "parents": _known_parents(run),
        }
        for each, depth in tree_order(above, [run_id]).items()
        for run in (family[each],)
    ]


def _known_parents(listed: Listed | None) -> list[dict[str, Any]]:
    return [] if listed is None else [parent for parent in listed.parents if isinstance(parent.get("run"), str)]
