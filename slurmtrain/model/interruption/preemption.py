"""What a site's configuration says of interruptions, and whether and how it preempts jobs: pure.

Sources: the manual pages of slurm.conf and sacctmgr, 22.05 to 25.11; where the grace comes from, the plugins
preempt/partition_prio and preempt/qos.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurmtrain.model.hostlist import expand_hostlist

# Slurm's own values where a configuration does not say.
KILL_WAIT_S = 30.0
CRED_EXPIRE_S = 120.0
SLURMD_TIMEOUT_S = 300.0
MAX_REQUEUES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the configuration of a site says of interruptions. Times are seconds; None: not told, or without end.

    ``user_signal``: the setting by which a job that is preempted gets the signal that it asked for in place of SIGTERM;
    empty: it gets SIGTERM.
    ``requeue_exit``: exit codes after which Slurm itself puts a job back.
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
        """How long Slurm holds a job back that was put into the queue again."""
        return self.cred_expire_s + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What a partition says of interruptions. Times are seconds; None: without end, or not told."""

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
    """A quality of service. ``mode``: how its jobs are preempted; None: as the cluster says. ``preempts``: QOS.

    ``own_limit``: whether its jobs may run for longer than their partition lets others (flag PartitionTimeLimit).
    """

    name: str
    preempts: frozenset[str] = frozenset()
    mode: frozenset[str] | None = None
    grace_s: float = 0.0
    own_limit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Whether jobs may be preempted (None: not known), how, with what grace, and on what grounds that is said.

    ``mode``: REQUEUE, CANCEL or SUSPEND. ``setting``: where an administrator sets the grace.
    """

    possible: bool | None
    mode: str = ""
    grace_s: float = 0.0
    why: str = ""
    setting: str = ""


def may_use(partition: Partition, groups: Collection[str], accounts: Collection[str] | None, *, root: bool) -> bool:
    """Whether a person of these groups and accounts (None: not known) may submit to a partition."""
    if root:
        return True
    if partition.root_only or (partition.groups is not None and not partition.groups & set(groups)):
        return False
    return partition.accounts is None or accounts is None or bool(partition.accounts & set(accounts))


def preemption(
    cluster: Cluster,
    partition: Partition,
    partitions: Collection[Partition],
    qos: Mapping[str, Qos] | None,
    own_qos: str | None,
) -> Preemption:
    """How a partition's jobs of a QOS are preempted.

    ``qos`` is None where accounting does not tell of any, ``own_qos`` where nothing tells which one a job has.
    """
    if cluster.preempt_type == "none":
        return Preemption(possible=False, why="this site preempts no jobs (PreemptType=preempt/none)")
    if cluster.preempt_type == "partition_prio":
        return _by_partition(partition, partitions)
    if cluster.preempt_type == "qos":
        return _by_qos(cluster, qos, own_qos)
    return Preemption(possible=None, why=f"PreemptType=preempt/{cluster.preempt_type} is not known here")


def _by_partition(partition: Partition, partitions: Collection[Partition]) -> Preemption:
    mode = _mode(partition.preempt_mode)
    if not mode:
        return Preemption(possible=False, why=f"partition {partition.name} has PreemptMode=OFF")
    above = sorted(one.name for one in partitions if one.tier > partition.tier and _meet(one.nodes, partition.nodes))
    if not above:
        why = f"no partition over the nodes of {partition.name} has a higher PriorityTier"
        return Preemption(possible=False, mode=mode, grace_s=partition.grace_s, why=why)
    return Preemption(
        possible=True,
        mode=mode,
        grace_s=partition.grace_s,
        why=f"by jobs of partition {', '.join(above)} (PreemptMode={mode}, GraceTime={partition.grace_s:.0f})",
        setting=f"GraceTime of partition {partition.name}",
    )


def _by_qos(cluster: Cluster, qos: Mapping[str, Qos] | None, own_qos: str | None) -> Preemption:
    if not qos:
        return Preemption(possible=None, why="jobs are preempted by QOS, and accounting does not tell of any")
    if own_qos is None or own_qos not in qos:
        name = "its QOS is not known" if own_qos is None else f"QOS {own_qos} is not known"
        return Preemption(possible=None, why=f"jobs are preempted by QOS, and {name}")
    own = qos[own_qos]
    above = sorted(one.name for one in qos.values() if own.name in one.preempts)
    mode = _mode(cluster.preempt_mode if own.mode is None else own.mode)
    if not above or not mode:
        return Preemption(possible=False, mode=mode, grace_s=own.grace_s, why=f"no QOS preempts QOS {own.name}")
    return Preemption(
        possible=True,
        mode=mode,
        grace_s=own.grace_s,
        why=f"by jobs of QOS {', '.join(above)} (PreemptMode={mode}, GraceTime={own.grace_s:.0f} of QOS {own.name})",
        setting=f"GraceTime of QOS {own.name}",
    )


def _mode(words: frozenset[str]) -> str:
    """What a PreemptMode such as ``SUSPEND,GANG`` does to a job; empty for OFF. GANG alone is no preemption."""
    return next((mode for mode in ("SUSPEND", "REQUEUE", "CANCEL") if mode in words), "")


def _meet(one: str, other: str) -> bool:
    """Whether two lists of nodes have a node in common; lists that cannot be read may."""
    try:
        first, second = set(expand_hostlist(one)), set(expand_hostlist(other))
    except ValueError:
        return True
    return bool(first & second) or not first or not second
