"""Requests that no partition could ever satisfy: sbatch takes some of them, and they wait for ever. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmtrain.model.fields import suggestion
from slurmtrain.model.plan import Plan
from slurmtrain.slurm.parse import count_of, read_duration

Partitions = Mapping[str, Mapping[str, str]]


def impossible(plan: Plan, partitions: Partitions) -> str | None:
    """Why no partition that the plan names, or that is the default, can ever run it; None if one may."""
    wanted = _wanted(plan, partitions)
    for name in wanted:
        if name not in partitions:
            near = suggestion(name, partitions)
            return f"slurm.partition: there is no partition {name!r}{near}; there are {', '.join(sorted(partitions))}"
    reasons = [_too_much(plan, name, partitions[name]) for name in wanted]
    told = [reason for reason in reasons if reason]
    return "; ".join(told) if reasons and len(told) == len(reasons) else None


def _wanted(plan: Plan, partitions: Partitions) -> Sequence[str]:
    named = plan.spec.slurm.get("partition")
    if named:
        return [name.strip() for name in str(named).split(",") if name.strip()]
    return [name for name, fields in partitions.items() if fields.get("Default") == "YES"]


def _too_much(plan: Plan, name: str, fields: Mapping[str, str]) -> str | None:
    resources = plan.spec.resources
    nodes = _least(fields.get("TotalNodes"), fields.get("MaxNodes"))
    if nodes is not None and resources.nodes > nodes:
        return f"resources.nodes: partition {name} gives a job {nodes} nodes at most, not {resources.nodes}"
    gpus = count_of(fields.get("TRES", ""), "gres/gpu")
    wanted = resources.nodes * resources.gpus_per_node
    if gpus is not None and wanted > gpus:
        return f"resources.gpus_per_node: partition {name} has {gpus} GPUs, not {wanted}"
    # A QOS may carry a time limit of its own that counts for more than the partition's.
    limit = read_duration(fields.get("MaxTime", ""))
    if limit is not None and resources.time is not None and resources.time > limit and not plan.spec.slurm.get("qos"):
        return f"resources.time: partition {name} lets a job run for {fields['MaxTime']} at most"
    return None


def _least(*counts: str | None) -> int | None:
    return min((int(count) for count in counts if count and count.isdigit()), default=None)
