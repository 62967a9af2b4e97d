"""The configuration of a site that concerns interruptions, and whether and how it preempts jobs. Pure.

Sources: the manual pages of slurm.conf and sacctmgr, 22.05 to 25.11; for the origin of the grace, the source code of
the plugins preempt/partition_prio and preempt/qos.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurmtrain.model.hostlist import expand_hostlist

# Slurm's defaults, for settings that a configuration leaves out.
KILL_WAIT_S = 30.0
CRED_EXPIRE_S = 120.0
SLURMD_TIMEOUT_S = 300.0
MAX_REQUEUES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The settings of a site that concern interruptions. Times are in seconds; None: unknown, or unlimited.

    ``user_signal``: the setting by which a preempted job gets the signal it requested instead of SIGTERM; empty: it
    gets SIGTERM. ``exempt_s``: how long a job runs before it may be preempted. ``over_limit_s``: how far a job may
    exceed its time limit. ``requeue_exit``: exit codes after which Slurm itself requeues a job.
    """

    version: tuple[int, int] | None = None
    job_requeue: bool = True
    preempt_type: str = "none"
    preempt_mode: frozenset[str] = frozenset({"OFF"})
    user_signal: str = ""
    exempt_s: float = 0.0
    kill_wait_s: float = KILL_WAIT_S
    max_requeues: int = MAX_REQUEUES
    cred_expire_s: float = CRED_EXPIRE_S
    slurmd_timeout_s: float = SLURMD_TIMEOUT_S
    over_limit_s: float | None = 0.0
    min_job_age_s: float = 300.0
    accounting: bool = True
    gathers_usage: bool = True
    prolog_flags: frozenset[str] = frozenset()
    requeue_exit: str = ""

    @property
    def requeue_delay_s(self) -> float:
        """How long Slurm holds a requeued job, in seconds: until the credential of its first start has expired."""
        return self.cred_expire_s + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The settings of a partition that concern interruptions. Times are in seconds; None: unlimited, or not set.

    ``groups``, ``accounts`` and ``qos``: whose jobs it takes; None: all jobs. ``nodes``: a host list.
    """

    name: str
    up: bool = True
    default: bool = False
    grace_s: float = 0.0
    preempt_mode: frozenset[str] = frozenset({"OFF"})
    tier: int = 1
    nodes: str = ""
    max_time_s: float | None = None
    default_time_s: float | None = None
    over_limit_s: float | None = None
    groups: frozenset[str] | None = None
    accounts: frozenset[str] | None = None
    qos: frozenset[str] | None = None
    root_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """A quality of service.

    ``preempts``: names of the QOS whose jobs it may preempt. ``mode``: how its own jobs are preempted; None: as the
    cluster says. ``grace_s``: their grace, in seconds. ``own_limit``: whether its jobs may exceed the time limit of
    their partition (flag PartitionTimeLimit).
    """

    name: str
    preempts: frozenset[str] = frozenset()
    mode: frozenset[str] | None = None
    grace_s: float = 0.0
    own_limit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Whether jobs may be preempted (None: unknown), how, and why that is so.

    ``mode``: REQUEUE, CANCEL or SUSPEND. ``grace_s``: the grace, in seconds. ``setting``: where an administrator sets
    the grace.
    """

    possible: bool | None
    mode: str = ""
    grace_s: float = 0.0
    why: str = ""
    setting: str = ""


def may_use(partition: Partition, groups: Collection[str], accounts: Collection[str] | None, *, root: bool) -> bool:
    """Whether a user may submit to ``partition``.

    ``groups`` and ``accounts``: the user's; accounts that are None are unknown. ``root``: whether the user is root.
    """
    if root:
        return True
    # Unknown accounts do not hide a partition: the table should rather list one too many.
    if partition.root_only or (partition.groups is not None and not partition.groups & set(groups)):
        return False
    return partition.accounts is None or accounts is None or bool(partition.accounts & set(accounts))


def find_preemption(
    cluster: Cluster,
    partition: Partition,
    partitions: Collection[Partition],
    qos: Mapping[str, Qos] | None,
    own_qos: str | None,
) -> Preemption:
    """How jobs in a partition are preempted.

    Args:
        cluster: The configuration of the site.
        partition: Where the jobs are.
        partitions: All of the site.
        qos: All of the site, by name; None if accounting does not answer.
        own_qos: The name of the jobs' QOS; None if unknown.
    """
    if cluster.preempt_type == "none":
        return Preemption(possible=False, why="this cluster does not preempt jobs (PreemptType=preempt/none)")
    if cluster.preempt_type == "partition_prio":
        mode = _mode(partition.preempt_mode)
        if not mode:
            return Preemption(possible=False, why=f"partition {partition.name} has PreemptMode=OFF")
        # Only a partition of a higher tier over some of the same nodes can take nodes from this one.
        above = sorted(p.name for p in partitions if p.tier > partition.tier and _overlap(p.nodes, partition.nodes))
        grace_s, setting = partition.grace_s, f"GraceTime of partition {partition.name}"
        by, grace = f"partition {', '.join(above)}", f"GraceTime={grace_s:.0f}"
        nobody = f"no other partition with nodes of {partition.name} has a higher PriorityTier"
    elif cluster.preempt_type == "qos":
        if not qos:
            return Preemption(possible=None, why="jobs are preempted by QOS, but accounting lists no QOS")
        if own_qos is None or own_qos not in qos:
            name = "its QOS is unknown" if own_qos is None else f"QOS {own_qos} is unknown"
            return Preemption(possible=None, why=f"jobs are preempted by QOS, and {name}")
        own = qos[own_qos]
        # A QOS without a mode of its own has the cluster's; the partition's mode does not count here.
        mode = _mode(cluster.preempt_mode if own.mode is None else own.mode)
        # A QOS lists whom it may preempt, so its preemptors are the QOS that list it.
        above = sorted(other.name for other in qos.values() if own.name in other.preempts)
        grace_s, setting = own.grace_s, f"GraceTime of QOS {own.name}"
        by, grace = f"QOS {', '.join(above)}", f"GraceTime={grace_s:.0f} of QOS {own.name}"
        nobody = f"no QOS preempts QOS {own.name}"
    else:
        return Preemption(possible=None, why=f"slurmtrain does not know PreemptType=preempt/{cluster.preempt_type}")
    if not above or not mode:
        return Preemption(possible=False, mode=mode, grace_s=grace_s, why=nobody)
    why = f"by jobs of {by} (PreemptMode={mode}, {grace})"
    return Preemption(possible=True, mode=mode, grace_s=grace_s, why=why, setting=setting)


def _mode(flags: frozenset[str]) -> str:
    """What a PreemptMode such as ``SUSPEND,GANG`` does to a job; empty for OFF, and for GANG alone: time slicing."""
    return next((mode for mode in ("SUSPEND", "REQUEUE", "CANCEL") if mode in flags), "")


def _overlap(nodes: str, other_nodes: str) -> bool:
    """Whether two host lists may share a node: yes if one is empty, or cannot be parsed."""
    # An unnecessary warning is better than a preemption without one.
    try:
        first, second = set(expand_hostlist(nodes)), set(expand_hostlist(other_nodes))
    except ValueError:
        return True
    return bool(first & second) or not first or not second
