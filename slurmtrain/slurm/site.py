"""Reading the configuration of a site from scontrol and sacctmgr. Text formats only, 22.05 to 25.11."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmtrain.errors import SlurmDown
from slurmtrain.model.interruption.preemption import (
    CRED_EXPIRE_S,
    KILL_WAIT_S,
    MAX_REQUEUES,
    SLURMD_TIMEOUT_S,
    Cluster,
    Partition,
    Qos,
)
from slurmtrain.slurm.parse import read_duration
from slurmtrain.slurm.slurm_commands import run_command

if TYPE_CHECKING:
    from slurmtrain.slurm.scheduler import Scheduler

# What a job array may have where slurm.conf does not say (slurm.conf(5), MaxArraySize).
MAX_ARRAY_SIZE = 1001
_QOS_FIELDS = ("name", "preempt", "preemptmode", "gracetime", "priority", "flags")
_ASSOCIATION_FIELDS = ("account", "partition", "qos", "defaultqos")
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
        return Site(cluster, partitions, config, unknown=("QOS and accounts: this site keeps no accounting",))
    unknown = []
    qos: dict[str, Qos] | None = None
    associations: list[Association] | None = None
    try:
        qos = read_qos(_accounting("qos", _QOS_FIELDS))
        associations = read_associations(_accounting("assoc", _ASSOCIATION_FIELDS, "where", f"user={user}"))
    except SlurmDown as error:
        unknown.append(f"{'QOS and accounts' if qos is None else 'accounts'}: {error}")
    return Site(cluster, partitions, config, qos, associations, tuple(unknown))


def max_array_size(config: Mapping[str, str]) -> int:
    """How many elements a job array may have (MaxArraySize, and max_array_tasks in SchedulerParameters)."""
    size = int(_seconds(config.get("MaxArraySize", ""), MAX_ARRAY_SIZE))
    tasks = re.search(r"(?:^|,)max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min(size, int(tasks[1])) if tasks else size


def component_problem(config: Mapping[str, str]) -> str:
    """Why a site runs no step over all components of a heterogeneous job; empty if it does."""
    scheduler = _plugin(config.get("SchedulerType", ""))
    if "DISABLE_HETJOB_STEPS" in _flags(config.get("SchedulerParameters", "")):
        return "this site allows no job step over several components (SchedulerParameters=disable_hetjob_steps)"
    # slurm.conf(5): only the backfill scheduler starts heterogeneous jobs.
    if scheduler != "backfill" and "SchedulerType" in config:
        return f"this site starts no heterogeneous jobs: that takes SchedulerType=sched/backfill, and it is {scheduler}"
    return ""


def _accounting(entity: str, fields: Sequence[str], *more: str) -> str:
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
    mode = _flags(config.get("PreemptMode", ""))
    # How long a job's credential is valid: a requeued job does not start before it expires.
    expire = re.search(r"(?:^|,)cred_expire=(\d+)", config.get("AuthInfo", ""))
    exits = config.get("RequeueExit", "")
    return Cluster(
        version=_version(config.get("SLURM_VERSION", "")),
        job_requeue=config.get("JobRequeue", "1") != "0",
        preempt_type=_plugin(config.get("PreemptType", "")),
        preempt_mode=mode or frozenset({"OFF"}),
        user_signal=_user_signal(config),
        exempt_s=read_duration(config.get("PreemptExemptTime", "")) or 0.0,
        kill_wait_s=_seconds(config.get("KillWait", ""), KILL_WAIT_S),
        max_requeues=int(_seconds(config.get("MaxBatchRequeue", ""), MAX_REQUEUES)),
        cred_expire_s=float(expire[1]) if expire else CRED_EXPIRE_S,
        slurmd_timeout_s=_seconds(config.get("SlurmdTimeout", ""), SLURMD_TIMEOUT_S),
        over_limit_s=_minutes(config.get("OverTimeLimit", "")),
        min_job_age_s=_seconds(config.get("MinJobAge", ""), 300.0),
        accounting=_plugin(config.get("AccountingStorageType", "")) == "slurmdbd",
        gathers_usage=_plugin(config.get("JobAcctGatherType", "")) != "none",
        prolog_flags=_flags(config.get("PrologFlags", "")),
        requeue_exit="" if exits.lower() in _NULLS else exits,
    )


def read_partition(fields: Mapping[str, str], cluster: Cluster) -> Partition:
    """A partition from its fields in ``scontrol show partition``."""
    over = fields.get("OverTimeLimit", "NONE")
    return Partition(
        name=fields.get("PartitionName", ""),
        up=fields.get("State", "UP") == "UP",
        default=fields.get("Default") == "YES",
        grace_s=_seconds(fields.get("GraceTime", ""), 0.0),
        # A partition without its own mode uses the cluster's.
        preempt_mode=_flags(fields.get("PreemptMode", "")) or cluster.preempt_mode,
        tier=int(_seconds(fields.get("PriorityTier", ""), 1.0)),
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
        modes = _flags(mode)
        by_name[name] = Qos(
            name=name,
            preempts=frozenset(other for other in preempts.split(",") if other),
            # "cluster" means the cluster's own mode (sacctmgr(1), PreemptMode).
            mode=None if not modes or modes & {"CLUSTER", "OFF"} else modes,
            grace_s=read_duration(grace) or 0.0,
            own_limit="PARTITIONTIMELIMIT" in _flags(flags),
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


# The same option in older and newer versions (slurm.conf(5)).
_USER_SIGNAL = (("SlurmctldParameters", "preempt_send_user_signal"), ("PreemptParameters", "send_user_signal"))


def _user_signal(config: Mapping[str, str]) -> str:
    """The option that sends a preempted job the signal of its --signal option; empty if it is not set."""
    for name, option in _USER_SIGNAL:
        if option in config.get(name, "").lower().split(","):
            return f"{name}={option}"
    return ""


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _plugin(value: str) -> str:
    """``qos`` from ``preempt/qos``; since 24.05 an unused plug-in reads ``(null)``."""
    return "none" if value.lower() in _NULLS else value.rpartition("/")[2]


def _flags(value: str) -> frozenset[str]:
    """The items of a comma-separated list, in upper case; none for Slurm's spellings of no value."""
    return frozenset() if value.lower() in _NULLS else frozenset(word.strip().upper() for word in value.split(","))


def _allowed(value: str) -> frozenset[str] | None:
    """The names that are allowed; None if all are."""
    return None if value.upper() in ("ALL", "") else frozenset(value.split(","))


def _seconds(value: str, default: float) -> float:
    match = re.match(r"\d+", value)
    return float(match[0]) if match else default


def _minutes(value: str) -> float | None:
    """Seconds from a value such as ``5 min``; None if unlimited."""
    return None if value.upper() in _ENDLESS else _seconds(value, 0.0) * 60
