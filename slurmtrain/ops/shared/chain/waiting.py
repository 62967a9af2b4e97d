"""What people see of runs that start after others: what they wait for, and what waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.chain.upstreams import UPSTREAM, Upstream, describe_wait
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import AFTER
from slurmtrain.ops.shared.chain.ending import dependents
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.choice.listed import Listed

# How many runs of a chain are listed.
_MOST_RUNS = 100
# In which a run may wait for others.
WAITING = frozenset({"created", "pending", "requeued"})


def upstreams_of(directory: RunDir) -> list[Upstream]:
    """The runs that one starts after; empty if that cannot be read."""
    from slurmtrain.runtime.chain.files import read_upstreams

    with contextlib.suppress(PathError):
        return read_upstreams(directory)
    return []


def describe_waits(workspace: Workspace, listed: Listed) -> str:
    """What a run waits for, such as ``after pretrain (running, step 120)``; empty if it waits for no run."""
    if not _waits_for_runs(workspace, listed):
        return ""
    upstreams = upstreams_of(workspace.root.run(listed.id))
    runs = workspace.store.listed([upstream.run for upstream in upstreams])
    present = [(upstream, runs[upstream.run]) for upstream in upstreams if upstream.run in runs]
    waits = [describe_wait(each, run.state, run.row["step"]) for each, run in present if not run.ended]
    return ", ".join(waits[:3]) + (f" and {len(waits) - 3} more" if len(waits) > 3 else "")


def _waits_for_runs(workspace: Workspace, listed: Listed) -> bool:
    """Whether a run starts after others, and has not begun."""
    if listed.state not in WAITING or not any(parent.get("relation") == AFTER for parent in listed.parents):
        return False
    return not workspace.root.run(listed.id).upstream_facts.exists()


def chain_json(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """The runs that one starts after, and those that start after it, as ``show --json`` has them."""
    directory = workspace.root.run(run_id)
    upstreams = upstreams_of(directory)
    after = dependents(workspace, [run_id])
    if not upstreams and not after:
        return {"after": [], "before": [], "chain": []}
    tree = _tree(workspace, run_id)
    runs = observe(workspace, [*(upstream.run for upstream in upstreams), *after, *tree], ask_slurm=False).runs
    return {
        "after": [
            {**_facts(runs.fetch([each.run]), each.run), "condition": "afterany" if each.any else "afterok"}
            for each in upstreams
        ],
        "before": [_facts(runs.fetch([each]), each) for each in after],
        "chain": [{**_facts(runs.fetch([each]), each), "depth": depth} for each, depth in tree.items()],
    }


def _tree(workspace: Workspace, run_id: str) -> dict[str, int]:
    """All runs of a run's chain, each below the first of those that it starts after, with how deep it is there."""
    tree: dict[str, int] = {}
    waiting = [(root, 0) for root in reversed(_roots(workspace, run_id))]
    while waiting and len(tree) < _MOST_RUNS:
        each, depth = waiting.pop()
        if each not in tree:
            tree[each] = depth
            waiting += [(below, depth + 1) for below in reversed(dependents(workspace, [each]))]
    return tree


def _roots(workspace: Workspace, run_id: str) -> list[str]:
    """The first runs of a run's chain: those before it, or before any of these, that start after none."""
    roots, visited, queue = [], {run_id}, [run_id]
    while queue and len(visited) < _MOST_RUNS:
        each = queue.pop()
        above = [upstream.run for upstream in upstreams_of(workspace.root.run(each))]
        if not above:
            roots.append(each)
        queue += [run for run in above if run not in visited]
        visited.update(above)
    return sorted(roots)


def _facts(runs: Mapping[str, Listed], run_id: str) -> dict[str, Any]:
    listed = runs.get(run_id)
    if listed is None:
        return {"id": run_id, "name": None, "state": None, "step": None}
    return {"id": run_id, "name": listed.name, "state": listed.state, "step": listed.row["step"]}


def open_dependents(workspace: Workspace, observed: Observed, run_ids: Sequence[str]) -> list[str]:
    """The runs that start after any of these, and those that start after them in turn, that have not ended.

    Args:
        workspace: Where they are.
        observed: What is known of them.
        run_ids: The runs.
    """
    queue, following = list(run_ids), dict.fromkeys(run_ids)
    while queue:
        queue = [each for each in dependents(workspace, queue) if each not in following]
        following |= dict.fromkeys(queue)
    listed = observed.runs.fetch(each for each in following if each not in run_ids)
    return [run_id for run_id, run in listed.items() if not run.ended]


def open_upstreams(workspace: Workspace, runs: Mapping[str, Listed]) -> list[str]:
    """The runs that any of these still waits for, and those that these wait for in turn.

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
