"""Requests that no partition could ever satisfy: sbatch takes some of them, and they wait for ever. Pure.

And nodes that a request can do without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.spec.fields import suggestion
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.sbatch import canonical
from slurmtrain.slurm.parse import NodeInfo, count_of, read_duration

Partitions = Mapping[str, Mapping[str, str]]
_FEATURE = r"[A-Za-z0-9_.:-]+"
# Modes of preemption that end a job; in the others it stays where it is, or is not preempted.
_ENDED_BY = {"REQUEUE", "CANCEL"}


@dataclass(frozen=True, slots=True)
class PartitionChoice:
    """Nodes that a request goes without, and those that it cannot do without, each with the reason.

    ``weighed``: whether it could be told what the request needs.
    """

    left_out: list[str] = field(default_factory=list)
    needed: dict[str, str] = field(default_factory=dict)
    weighed: bool = True


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


def partition(plan: Plan, partitions: Partitions) -> str:
    """The partitions that a plan may run in, as one name: those it names, or the default one, in order."""
    return ",".join(sorted(_wanted(plan, partitions)))


def grace(plan: Plan, partitions: Partitions) -> float | None:
    """For how many seconds a job of this plan goes on once it is preempted, in the strictest of its partitions.

    None where none of them has its jobs ended by others, or where a QOS, which may have a grace of its own, is named.
    """
    if plan.spec.slurm.get("qos"):
        return None
    wanted = [partitions[name] for name in _wanted(plan, partitions) if name in partitions]
    ending = [fields for fields in wanted if _ENDED_BY & set(fields.get("PreemptMode", "").split(","))]
    times = [fields.get("GraceTime", "") for fields in ending]
    return min((float(seconds) for seconds in times if seconds.isdecimal()), default=None)


def leave_out(
    plan: Plan, partitions: Partitions, nodes: Sequence[NodeInfo], unwanted: Sequence[str]
) -> PartitionChoice:
    """Which of the unwanted nodes, the least wanted one first, a plan can do without.

    Nodes that no wanted partition has are passed over. What cannot be weighed (a reservation, features that are
    combined in other ways than by ``&`` or ``|`` alone, files of names) keeps all of them.
    """
    options = {canonical(name): str(value) for name, value in plan.spec.slurm.items() if value not in (None, False)}
    wanted = _wanted(plan, partitions)
    known = {node.name for node in nodes if node.partition in wanted}
    asked = [name for name in dict.fromkeys(unwanted) if name in known]
    if "/" in options.get("exclude", ""):  # which sbatch takes for a file
        return PartitionChoice(needed=dict.fromkeys(asked, "slurm.exclude is a file"))
    if (why := _cannot_weigh(options)) is not None:
        return PartitionChoice(needed=dict.fromkeys(asked, why), weighed=False)
    try:
        excluded, named = (
            set(expand_hostlist(options.get("exclude", ""))),
            set(expand_hostlist(options.get("nodelist", ""))),
        )
    except ValueError:
        return PartitionChoice()  # sbatch has words for what is no list of nodes
    fitting = [node for node in nodes if node.partition in wanted and _fits(node, plan, options)]
    choice = PartitionChoice()
    for name in [name for name in asked if name not in excluded]:
        gone = excluded | {*choice.left_out, name}
        left = max(sum(node.partition == one and node.name not in gone for node in fitting) for one in wanted)
        if name in named:
            choice.needed[name] = "slurm.nodelist names it"
        elif left < plan.spec.resources.allocated.min and any(node.name == name for node in fitting):
            choice.needed[name] = too_few(plan.spec.resources.allocated.min, left)
        else:
            choice.left_out.append(name)
    return choice


def too_few(wanted: int, left: int) -> str:
    """That not enough nodes would be left, in words."""
    nodes = "1 node is" if wanted == 1 else f"{wanted} nodes are"
    return f"{nodes} needed and {left or 'none'} would be left"


def _cannot_weigh(options: Mapping[str, str]) -> str | None:
    """Why it cannot be told here which nodes a request could have."""
    for name in ("reservation", "nodefile"):
        if name in options:
            return f"only Slurm knows the nodes of slurm.{name}"
    if "/" in options.get("nodelist", ""):
        return "slurm.nodelist is a file"
    constraint = options.get("constraint", "")
    if constraint and not any(re.fullmatch(rf"{_FEATURE}({sign}{_FEATURE})*", constraint) for sign in ("&", r"\|")):
        return "only Slurm knows the nodes of slurm.constraint"
    return None


def _fits(node: NodeInfo, plan: Plan, options: Mapping[str, str]) -> bool:
    """Whether a node may get a task of this plan, as far as that can be told without Slurm."""
    resources = plan.spec.resources
    if not _has_features(node.features, options.get("constraint", "")):
        return False
    if node.cpus is not None and node.cpus < resources.cpus_per_proc * resources.local_world_size:
        return False
    if node.memory is not None and node.memory < (resources.mem or 0):
        return False
    return node.usable and node.gpus >= resources.gpus_per_node


def _has_features(features: frozenset[str], constraint: str) -> bool:
    wanted = set(re.findall(_FEATURE, constraint))
    return bool(wanted & features) if "|" in constraint else wanted <= features


def _wanted(plan: Plan, partitions: Partitions) -> Sequence[str]:
    named = plan.spec.slurm.get("partition")
    if named:
        return [name.strip() for name in str(named).split(",") if name.strip()]
    return [name for name, fields in partitions.items() if fields.get("Default") == "YES"]


def _too_much(plan: Plan, name: str, fields: Mapping[str, str]) -> str | None:
    resources = plan.spec.resources
    nodes = _least(fields.get("TotalNodes"), fields.get("MaxNodes"))
    least = resources.allocated.min
    if nodes is not None and least > nodes:
        return f"resources.nodes: partition {name} gives a job {nodes} nodes at most, not {least}"
    gpus = count_of(fields.get("TRES", ""), "gres/gpu")
    wanted = least * resources.gpus_per_node
    if gpus is not None and wanted > gpus:
        return f"resources.gpus_per_node: partition {name} has {gpus} GPUs, not {wanted}"
    # A QOS may carry a time limit of its own that counts for more than the partition's.
    limit = read_duration(fields.get("MaxTime", ""))
    if limit is not None and resources.time is not None and resources.time > limit and not plan.spec.slurm.get("qos"):
        return f"resources.time: partition {name} lets a job run for {fields['MaxTime']} at most"
    return None


def _least(*counts: str | None) -> int | None:
    return min((int(count) for count in counts if count and count.isdigit()), default=None)
