"""The configuration of a site from scontrol and sacctmgr, and what its partitions allow. Text formats, 22.05 to 25.11.

Slurm itself accepts some requests that it can never satisfy (EnforcePartLimits=NO, the default of slurm.conf(5)): their
jobs would wait forever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmtrain.errors import SlurmDown
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.slurm_options import named_options
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.hostlist import expand_hostlist
from slurmtrain.model.interruption.preemption import (
    CRED_EXPIRE_S,
    KILL_WAIT_S,
    MAX_REQUEUES,
    SLURMD_TIMEOUT_S,
    Cluster,
    Partition,
    Qos,
)
from slurmtrain.slurm.parse import NodeInfo, count_of, read_duration
from slurmtrain.slurm.slurm_commands import run_command

if TYPE_CHECKING:
    from slurmtrain.slurm.scheduler import Scheduler

# What a job array may have where slurm.conf does not say (slurm.conf(5), MaxArraySize).
MAX_ARRAY_SIZE = 1001
_QOS_FIELDS = ("name", "preempt", "preemptmode", "gracetime", "priority", "flags")
_ASSOCIATION_FIELDS = ("account", "partition", "qos", "defaultqos")
# The same option in older and newer versions (slurm.conf(5)).
_USER_SIGNAL = (("SlurmctldParameters", "preempt_send_user_signal"), ("PreemptParameters", "send_user_signal"))
_NULLS = {"", "(null)", "none", "n/a", "unknown"}
_ENDLESS = {"UNLIMITED", "INFINITE"}


@dataclass(frozen=True, slots=True)
class Association:
    """A combination of cluster resources that a user may use (sacctmgr(1), associations).

    ``partition``: empty for any. ``default_qos``: one of ``qos``, or empty.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """The configuration of a site.

    ``config``: slurm.conf as scontrol prints it. ``qos`` (by name) and ``associations`` are None if accounting does not
    answer. ``unknown``: what could not be queried, and why.
    """

    cluster: Cluster
    partitions: Mapping[str, Partition]
    config: Mapping[str, str] = field(default_factory=dict)
    qos: Mapping[str, Qos] | None = None
    associations: Sequence[Association] | None = None
    unknown: Sequence[str] = ()


def read_site(scheduler: Scheduler, user: str) -> Site:
    """Query Slurm's configuration, and QOS and associations of ``user`` from accounting. Raises SlurmDown."""
    config = scheduler.config()
    cluster = read_cluster(config)
    partitions = {name: read_partition(fields, cluster) for name, fields in scheduler.partitions().items()}
    if not cluster.accounting:
        return Site(cluster, partitions, config, unknown=("QOS and accounts: this cluster has no accounting",))
    unknown = []
    qos: dict[str, Qos] | None = None
    associations: list[Association] | None = None
    try:
        qos = read_qos(_ask_accounting("qos", _QOS_FIELDS))
        associations = read_associations(_ask_accounting("assoc", _ASSOCIATION_FIELDS, "where", f"user={user}"))
    except SlurmDown as error:
        unknown.append(f"{'QOS and accounts' if qos is None else 'accounts'}: {error}")
    return Site(cluster, partitions, config, qos, associations, tuple(unknown))


def max_array_size(config: Mapping[str, str]) -> int:
    """How many elements a job array may have (MaxArraySize, and max_array_tasks in SchedulerParameters)."""
    size = int(_leading_number(config.get("MaxArraySize", ""), MAX_ARRAY_SIZE))
    tasks = re.search(r"(?:^|,)max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min(size, int(tasks[1])) if tasks else size


def component_problem(config: Mapping[str, str]) -> str:
    """Why a site runs no step over all components of a heterogeneous job; empty if it does."""
    scheduler = _plugin(config.get("SchedulerType", ""))
    if "DISABLE_HETJOB_STEPS" in _flag_set(config.get("SchedulerParameters", "")):
        return "this site allows no job step over several components (SchedulerParameters=disable_hetjob_steps)"
    # slurm.conf(5): only the backfill scheduler starts heterogeneous jobs.
    if scheduler != "backfill" and "SchedulerType" in config:
        return f"this cluster cannot start heterogeneous jobs: SchedulerType must be sched/backfill, not {scheduler}"
    return ""


def _ask_accounting(entity: str, fields: Sequence[str], *more: str) -> str:
    return run_command("sacctmgr", "--parsable2", "--noheader", "show", entity, *more, f"format={','.join(fields)}")


def read_config(text: str) -> dict[str, str]:
    """Names and values of ``scontrol show config``; other lines, such as lines about daemons, are skipped.

    Sections of plug-ins follow and may repeat names: the first occurrence counts.
    """
    config: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name = name.strip()
        if equals and name and " " not in name:
            config.setdefault(name, value.strip())
    return config


def read_cluster(config: Mapping[str, str]) -> Cluster:
    """What the configuration says about interruptions, with Slurm's defaults (slurm.conf(5)) for missing settings."""
    mode = _flag_set(config.get("PreemptMode", ""))
    # How long a job's credential is valid: a requeued job does not start before it expires.
    expire = re.search(r"(?:^|,)cred_expire=(\d+)", config.get("AuthInfo", ""))
    exits = config.get("RequeueExit", "")
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    # The option that sends a preempted job the signal of its --signal option.
    user_signal = (
        f"{name}={option}" for name, option in _USER_SIGNAL if option in config.get(name, "").lower().split(",")
    )
    return Cluster(
        version=(int(version[1]), int(version[2])) if version else None,
        job_requeue=config.get("JobRequeue", "1") != "0",
        preempt_type=_plugin(config.get("PreemptType", "")),
        preempt_mode=mode or frozenset({"OFF"}),
        user_signal=next(user_signal, ""),
        exempt_s=read_duration(config.get("PreemptExemptTime", "")) or 0.0,
        kill_wait_s=_leading_number(config.get("KillWait", ""), KILL_WAIT_S),
        max_requeues=int(_leading_number(config.get("MaxBatchRequeue", ""), MAX_REQUEUES)),
        cred_expire_s=float(expire[1]) if expire else CRED_EXPIRE_S,
        slurmd_timeout_s=_leading_number(config.get("SlurmdTimeout", ""), SLURMD_TIMEOUT_S),
        over_limit_s=_minutes(config.get("OverTimeLimit", "")),
        # Seconds, Slurm's default (slurm.conf(5), MinJobAge).
        min_job_age_s=_leading_number(config.get("MinJobAge", ""), 300.0),
        accounting=_plugin(config.get("AccountingStorageType", "")) == "slurmdbd",
        gathers_usage=_plugin(config.get("JobAcctGatherType", "")) != "none",
        prolog_flags=_flag_set(config.get("PrologFlags", "")),
        requeue_exit="" if exits.lower() in _NULLS else exits,
    )


def read_partition(fields: Mapping[str, str], cluster: Cluster) -> Partition:
    """A partition from its fields in ``scontrol show partition``."""
    over = fields.get("OverTimeLimit", "NONE")
    return Partition(
        name=fields.get("PartitionName", ""),
        up=fields.get("State", "UP") == "UP",
        default=fields.get("Default") == "YES",
        grace_s=_leading_number(fields.get("GraceTime", ""), 0.0),
        # A partition without its own mode uses the cluster's.
        preempt_mode=_flag_set(fields.get("PreemptMode", "")) or cluster.preempt_mode,
        tier=int(_leading_number(fields.get("PriorityTier", ""), 1.0)),
        nodes="" if fields.get("Nodes", "").lower() in _NULLS else fields["Nodes"],
        max_time_s=read_duration(fields.get("MaxTime", "")),
        default_time_s=read_duration(fields.get("DefaultTime", "")),
        over_limit_s=None if over.upper() in {"NONE", ""} else _minutes(over),
        groups=_allowed(fields.get("AllowGroups", "ALL")),
        accounts=_allowed(fields.get("AllowAccounts", "ALL")),
        qos=_allowed(fields.get("AllowQos", "ALL")),
        root_only=fields.get("RootOnly") == "YES",
    )


def read_qos(text: str) -> dict[str, Qos]:
    """QOS by name from ``sacctmgr --parsable2 --noheader show qos``; lines that are too short are skipped."""
    by_name = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < len(_QOS_FIELDS) or not cells[0]:
            continue
        name, preempts, mode, grace, _, flags = cells[:6]
        modes = _flag_set(mode)
        by_name[name] = Qos(
            name=name,
            preempts=frozenset(other for other in preempts.split(",") if other),
            # "cluster" means the cluster's own mode (sacctmgr(1), PreemptMode).
            mode=None if not modes or modes & {"CLUSTER", "OFF"} else modes,
            grace_s=read_duration(grace) or 0.0,
            own_limit="PARTITIONTIMELIMIT" in _flag_set(flags),
        )
    return by_name


def read_associations(text: str) -> list[Association]:
    """What a user may use, from ``sacctmgr --parsable2 --noheader show assoc``."""
    associations = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) >= len(_ASSOCIATION_FIELDS) and cells[0]:
            account, partition, qos, default = cells[:4]
            names = tuple(name for name in qos.split(",") if name)
            associations.append(Association(account, partition, names, default))
    return associations


def _plugin(value: str) -> str:
    """``qos`` from ``preempt/qos``; since 24.05 an unused plug-in reads ``(null)``."""
    return "none" if value.lower() in _NULLS else value.rpartition("/")[2]


def _flag_set(value: str) -> frozenset[str]:
    """The items of a comma-separated list, in upper case; none for Slurm's spellings of no value."""
    return frozenset() if value.lower() in _NULLS else frozenset(word.strip().upper() for word in value.split(","))


def _allowed(value: str) -> frozenset[str] | None:
    """The names that are allowed; None if all are."""
    return None if value.upper() in ("ALL", "") else frozenset(value.split(","))


def _leading_number(value: str, default: float) -> float:
    match = re.match(r"\d+", value)
    return float(match[0]) if match else default


def _minutes(value: str) -> float | None:
    """Seconds from a value such as ``5 min``; None if unlimited."""
    return None if value.upper() in _ENDLESS else _leading_number(value, 0.0) * 60


# --- what partitions allow -------------------------------------------------------------------------------------------

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
    resources, fitting = plan.spec.resources, 0
    for node in in_them:
        counts = [pack.runs]
        if node.cpus is not None:
            counts.append(node.cpus // resources.cpus_per_node)
        if node.memory is not None and resources.mem:
            counts.append(node.memory // resources.mem)
        if resources.gpus_per_node and not pack.share_gpu:
            counts.append(_gpus_for(node, resources) // resources.gpus_per_node)
        fitting = max(fitting, min(counts))
    if fitting >= pack.runs or not fitting:
        # What is too large alone is not the pack's fault; Slurm says what is.
        return None
    return (
        f"sweep.pack: {pack.runs} of these runs need more CPUs, GPUs or memory than any node of partition "
        f"{', '.join(names)} has; at most {fitting} fit on one node"
    )


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
    fitting = [node for node in nodes if node.partition in names and _node_fits(node, plan, options)]
    choice = NodeChoice()
    # The least wanted first: each exclusion leaves fewer nodes to do without.
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


def _node_fits(node: NodeInfo, plan: Plan, options: Mapping[str, str]) -> bool:
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
