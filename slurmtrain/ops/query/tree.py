"""Runs in the order of their chains: below each run the runs that start after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.model.query.folding import fold_sweep
from slurmtrain.model.run.chain.tree import tree_order
from slurmtrain.ops.shared.chain.waiting import chains_of
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import ListedRuns
    from slurmtrain.registry.choice.listed import Listed


def chain_lines(
    workspace: Workspace, runs: ListedRuns, shown: Sequence[Mapping[str, Any]], *, folds: bool
) -> list[Mapping[str, Any]]:
    """Runs and all others of their chains: RUN of the JSON of each, with its ``depth`` in the tree.

    Args:
        workspace: Where they are.
        runs: All runs, as observed.
        shown: Runs that are to be shown in any case, in order. Other users' runs, whose chains are unknown, come last.
        folds: The runs of a sweep are one line.
    """
    own = [run["id"] for run in shown if "user" not in run]
    chains = chains_of(workspace, own)
    members = runs.fetch(runs.index_of(sorted(chains)))
    line_of = {each.id: str(each.sweep) if folds and each.sweep else each.id for each in members.values()}
    lines: dict[str, list[Listed]] = {}
    above: dict[str, set[str]] = {}
    for run_id, listed in members.items():
        line = line_of[run_id]
        lines.setdefault(line, []).append(listed)
        above.setdefault(line, set()).update(line_of[each] for each in chains[run_id] if each in line_of)
    tree = tree_order(above, [line_of[run_id] for run_id in own if run_id in line_of])
    in_tree = [{**_line(workspace, lines[line]), "depth": depth} for line, depth in tree.items()]
    return [*in_tree, *(run for run in shown if "user" in run)]


def _line(workspace: Workspace, of_line: Sequence[Listed]) -> Mapping[str, Any]:
    records = [RunRecord(workspace, listed) for listed in of_line]
    if len(records) == 1:
        return records[0]
    folded = fold_sweep(records)
    # What all of them wait for, or why they will never start.
    reasons = {record["reason"] for record in records if record["reason"]}
    return {**folded, "reason": f"{reasons.pop()}; {folded['reason']}"} if len(reasons) == 1 else folded
