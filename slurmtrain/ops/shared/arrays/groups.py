"""Which attempts of runs that exist already share a submission, and how many of each may run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.sweep import packing_problem
from slurmtrain.ops.shared.arrays.grouping import pack_of_group, request_key, split_groups
from slurmtrain.ops.shared.arrays.start_array import Element
from slurmtrain.ops.shared.arrays.sweep_limits import SweepLimit, read_limits, share_limit
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.chain.files import read_upstreams


def groups_of(workspace: Workspace, elements: Sequence[Element]) -> list[tuple[Sequence[Element], SweepLimit]]:
    """The attempts that share a submission to Slurm, how many of its jobs may run at once, and how runs share those.

    Args:
        workspace: where the runs are, which have been observed.
        elements: the attempts.
    """
    if len(elements) < 2:
        return [(elements, SweepLimit())] if elements else []
    limits = read_limits(workspace, [each.run.id for each in elements])
    bounded: dict[SweepLimit, list[Element]] = {}
    for each in elements:
        limit = _possible(limits[each.run.id], each.attempt.plan)
        # Runs without a limit may share an array, whichever sweep they are of.
        bounded.setdefault(limit if limit.parallel else SweepLimit(pack=limit.pack), []).append(each)
    largest = workspace.scheduler.max_array_size()
    groups: list[tuple[Sequence[Element], SweepLimit]] = []
    for limit, members in bounded.items():
        keyed = [
            (request_key(each.attempt.plan, each.attempt.secrets, read_upstreams(each.run)), each) for each in members
        ]
        split = split_groups(keyed, largest, limit.pack.runs if limit.pack is not None else 1)
        shares = share_limit(limit.parallel, [len(group) for group in split], limit.pack)
        for group, at_once in zip(split, shares, strict=True):
            groups.append((group, replace(limit, parallel=at_once, pack=pack_of_group(limit.pack, len(group)))))
    return groups


def _possible(limit: SweepLimit, plan: Plan) -> SweepLimit:
    """The limit without its pack, if an override of the run's has made it too large for one."""
    if limit.pack is None or not packing_problem(plan.spec.resources, limit.pack, plan.spec.slurm):
        return limit
    return replace(limit, pack=None)
