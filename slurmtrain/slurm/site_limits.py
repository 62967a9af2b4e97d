"""What partitions allow: which requests can never be satisfied, and which nodes a request can exclude. Pure.

Slurm itself accepts some requests that it can never satisfy (EnforcePartLimits=NO, the default of slurm.conf(5)): their
jobs would wait forever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.slurm_options import named_options
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.slurm.parse import NodeInfo, count_of, read_duration

Partitions = Mapping[str, Mapping[str, str]]
_FEATURE = r"[A-Za-z0-9_.:-]+"
# Preemption modes that end a job; in the other modes it stays on its nodes or is not preempted (slurm.conf(5)).
_ENDING_MODES = {"REQUEUE", "CANCEL"}


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Which of the unwanted nodes a request excludes.

    ``excluded``: nodes that it can do without. ``needed``: the others, each with the reason. ``is_decidable``: whether
    the nodes that the request could get can be determined here.
    """

    excluded: list[str] = field(default_factory=list)
    needed: dict[str, str] = field(default_factory=dict)
    is_decidable: bool = True


def rejection_reason(plan: Plan, partitions: Partitions) -> str | None:
    """Why none of the plan's partitions, or the default partition, can ever run it; None if one might.

    For a heterogeneous job, the reason of the first component that has one.
    """
    if plan.spec.resources.components:
        reasons = enumerate(_rejection_reason(part, partitions) for part in plan.components)
        return next((f"component {number}: {reason}" for number, reason in reasons if reason), None)
    return _rejection_reason(plan, partitions)


def _rejection_reason(plan: Plan, partitions: Partitions) -> str | None:
    names = _named_partitions(plan, partitions)
    for name in names:
        if name not in partitions:
            near = suggestion(name, partitions)
            return f"slurm.partition: there is no partition {name!r}{near}; there are {', '.join(sorted(partitions))}"
    # The job runs in the first of its partitions that accepts it, so one possible partition is enough.
    reasons = [_excess(plan, name, partitions[name]) for name in names]
    return "; ".join(reason for reason in reasons if reason) if reasons and all(reasons) else None


def excess_of_pack(plan: Plan, pack: Pack, partitions: Partitions, nodes: Sequence[NodeInfo]) -> str | None:
    """Why no node is large enough for the job of a pack; None if one may be.

    Args:
        plan: the plan of each of its runs.
        pack: how they share the job.
        partitions: the fields of each partition, by name.
        nodes: every node, once for each of its partitions.
    """
    names = _named_partitions(plan, partitions)
    in_them = [node for node in nodes if node.partition in names]
    if not in_them:
        return None
    fitting = max(_runs_on(node, plan.spec.resources, pack) for node in in_them)
    if fitting >= pack.runs or not fitting:
        # What is too large alone is not the pack's fault; Slurm says what is.
        return None
    return (
        f"sweep.pack: {pack.runs} of these runs need more CPUs, GPUs or memory than any node of partition "
        f"{', '.join(names)} has: at most {fitting} fit on one"
    )


def _runs_on(node: NodeInfo, resources: ResourcesSpec, pack: Pack) -> int:
    """How many runs of a pack one node is large enough for."""
    counts = [pack.runs]
    if node.cpus is not None:
        counts.append(node.cpus // resources.cpus_per_node)
    if node.memory is not None and resources.mem:
        counts.append(node.memory // resources.mem)
    if resources.gpus_per_node and not pack.share_gpu:
        counts.append(_gpus_for(node, resources) // resources.gpus_per_node)
    return min(counts)


def _gpus_for(node: NodeInfo, resources: ResourcesSpec) -> int:
    """How many GPUs of a ``node`` are of the type that a run requests."""
    return node.gpus_of_types.get(resources.gpu_type, 0) if resources.gpu_type else node.gpus


def partition_names(plan: Plan, partitions: Partitions) -> str:
    """The partitions that a plan may run in, sorted and joined by commas: its own, or the default one."""
    return ",".join(sorted({name for part in plan.components for name in _named_partitions(part, partitions)}))


def grace_s(plan: Plan, partitions: Partitions) -> float | None:
    """How many seconds a job of this plan keeps running after preemption: the minimum GraceTime of its partitions.

    None if preemption ends jobs in none of them, or if the plan names a QOS, which may have its own grace time. A
    heterogeneous job can be preempted only if all of its components can (src/interfaces/preempt.c of Slurm).
    """
    times = [_grace_s(part, partitions) for part in plan.components]
    ending = [seconds for seconds in times if seconds is not None]
    return min(ending) if len(ending) == len(times) else None


def _grace_s(plan: Plan, partitions: Partitions) -> float | None:
    if named_options(plan.spec.slurm).get("qos"):
        return None
    candidates = [partitions[name] for name in _named_partitions(plan, partitions) if name in partitions]
    ending = [fields for fields in candidates if _ENDING_MODES & set(fields.get("PreemptMode", "").split(","))]
    times = [fields.get("GraceTime", "") for fields in ending]
    return min((float(seconds) for seconds in times if seconds.isdecimal()), default=None)


def choose_nodes(plan: Plan, partitions: Partitions, nodes: Sequence[NodeInfo], unwanted: Sequence[str]) -> NodeChoice:
    """Which of the unwanted nodes a plan can do without.

    If only Slurm knows the nodes that a request could get (a reservation, features that are not combined by ``&`` or
    ``|`` alone, files of names), none is excluded.

    Args:
        plan: what to run.
        partitions: the fields of each partition, by name.
        nodes: every node, once for each of its partitions.
        unwanted: names of nodes, the least wanted first; nodes outside the plan's partitions are ignored.
    """
    options = {name: str(value) for name, value in named_options(plan.spec.slurm).items()}
    names = _named_partitions(plan, partitions)
    present = {node.name for node in nodes if node.partition in names}
    candidates = [name for name in dict.fromkeys(unwanted) if name in present]
    # A value with a slash is a file of names to sbatch; no names can be added to it.
    if "/" in options.get("exclude", ""):
        return NodeChoice(needed=dict.fromkeys(candidates, "slurm.exclude is a file"))
    reason = "only Slurm knows the nodes of each component" if plan.spec.resources.components else _undecidable(options)
    if reason is not None:
        return NodeChoice(needed=dict.fromkeys(candidates, reason), is_decidable=False)
    try:
        excluded, named = (
            set(expand_hostlist(options.get("exclude", ""))),
            set(expand_hostlist(options.get("nodelist", ""))),
        )
    except ValueError:
        return NodeChoice()  # not a valid list of nodes: sbatch will report it
    fitting = [node for node in nodes if node.partition in names and _fits(node, plan, options)]
    choice = NodeChoice()
    for name in [name for name in candidates if name not in excluded]:
        gone = excluded | {*choice.excluded, name}
        # A job gets its nodes from one partition.
        left = max(sum(node.partition == each and node.name not in gone for node in fitting) for each in names)
        if name in named:
            choice.needed[name] = "slurm.nodelist names it"
        elif left < plan.spec.resources.allocated.min and any(node.name == name for node in fitting):
            choice.needed[name] = describe_too_few(plan.spec.resources.allocated.min, left)
        else:
            choice.excluded.append(name)
    return choice


def describe_too_few(needed: int, left: int) -> str:
    """The reason that ``left`` nodes would not be enough."""
    nodes = "1 node is" if needed == 1 else f"{needed} nodes are"
    return f"{nodes} needed and {left or 'none'} would be left"


def _undecidable(options: Mapping[str, str]) -> str | None:
    """Why the nodes that a request could get cannot be determined here; None if they can."""
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
    """Whether a node may get a task of this plan, as far as can be determined without Slurm."""
    resources = plan.spec.resources
    constraint = options.get("constraint", "")
    required = set(re.findall(_FEATURE, constraint))
    if not (required & node.features if "|" in constraint else required <= node.features):
        return False
    if node.cpus is not None and node.cpus < resources.cpus_per_node:
        return False
    if node.memory is not None and node.memory < (resources.mem or 0):
        return False
    return node.usable and _gpus_for(node, resources) >= resources.gpus_per_node


def _named_partitions(plan: Plan, partitions: Partitions) -> Sequence[str]:
    named = named_options(plan.spec.slurm).get("partition")
    if named:
        return [name.strip() for name in str(named).split(",") if name.strip()]
    return [name for name, fields in partitions.items() if fields.get("Default") == "YES"]


def _excess(plan: Plan, name: str, fields: Mapping[str, str]) -> str | None:
    """What a plan requests that a partition can never provide; None if there is no such thing."""
    resources = plan.spec.resources
    counts = (fields.get("TotalNodes"), fields.get("MaxNodes"))
    nodes = min((int(count) for count in counts if count and count.isdigit()), default=None)
    least = resources.allocated.min
    if nodes is not None and least > nodes:
        return f"resources.nodes: partition {name} gives a job {nodes} nodes at most, not {least}"
    gpus = count_of(fields.get("TRES", ""), "gres/gpu")
    needed = least * resources.gpus_per_node
    if gpus is not None and needed > gpus:
        return f"resources.gpus_per_node: partition {name} has {gpus} GPUs, not {needed}"
    # A QOS may have a limit of its own that overrides the partition's (PartitionTimeLimit, sacctmgr(1)).
    limit = read_duration(fields.get("MaxTime", ""))
    own_qos = named_options(plan.spec.slurm).get("qos")
    if limit is not None and resources.time is not None and resources.time > limit and not own_qos:
        return f"resources.time: partition {name} lets a job run for {fields['MaxTime']} at most"
    return None
