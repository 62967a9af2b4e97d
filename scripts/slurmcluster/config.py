"""The text of every configuration file, and writing those that are missing."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

from . import faults, releases
from .cluster import Cluster, Settings, write_file
from .network import ETC
from .processes import run

CONTROLLER = "controller"
MEMORY_MB = 16000
PARTITIONS = {
    "spot": "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}",
    "spot-cancel": "PriorityTier=1 PreemptMode=CANCEL GraceTime={grace}",
    "ondemand": "PriorityTier=100 PreemptMode=OFF",
}
DIRECTORIES = {
    "run": 0o755,
    "log": 0o755,
    "gpus": 0o755,
    "spool": 0o755,
    "keys": 0o700,
    "ctld": 0o700,
}


def write(cluster: Cluster, settings: Settings) -> None:
    """Write the files that are missing; those that are there stay as they are, whoever edited them."""
    directory = cluster.directory
    for name, mode in DIRECTORIES.items():
        (directory / name).mkdir(mode, exist_ok=True)
    for node in settings.names:
        (directory / "spool" / node).mkdir(exist_ok=True)
    for gpu in range(settings.gpus):
        device = directory / "gpus" / f"nvidia{gpu}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")
    files = {
        "slurm.conf": (slurm_conf(cluster, settings), 0o644),
        "gres.conf": (gres_conf(cluster, settings), 0o644),
        "cgroup.conf": (cgroup_conf(slurm_version(cluster)), 0o644),
        "slurmdbd.conf": (slurmdbd_conf(cluster, settings), 0o600),
        "keys/munge.key": (secrets.token_hex(64), 0o600),
        "task-prolog": (faults.task_prolog(cluster), 0o755),
    }
    for name, (text, mode) in files.items():
        if not (directory / name).exists():
            write_file(directory / name, text, mode)
    for etc in (directory / "etc", *(ETC / cluster.namespace(node) for node in settings.names)):
        _write_etc(etc, settings)


def slurm_conf(cluster: Cluster, settings: Settings) -> str:
    """Short times throughout: what takes minutes on a site takes seconds here."""
    directory, (controller, slurmd, slurmdbd) = cluster.directory, settings.ports
    lines = [
        f"ClusterName={cluster.name}",
        f"SlurmctldHost={CONTROLLER}({settings.controller_address})",
        f"SlurmctldPort={controller}",
        f"SlurmdPort={slurmd}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={cluster.munge_socket},cred_expire=5",
        f"StateSaveLocation={directory}/ctld",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/run/slurmctld.pid",
        f"SlurmdPidFile={directory}/run/%n.pid",
        "MailProg=/bin/true",
        f"TaskProlog={directory}/task-prolog",
        "",
        "# One kernel for all nodes: no cgroups, and more CPUs and memory claimed than there are.",
        "ProctrackType=proctrack/linuxproc",
        "SlurmdParameters=config_overrides",
        "MpiDefault=none",
        "",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        f"DefMemPerCPU={MEMORY_MB // settings.cpus}",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "",
        "SlurmdTimeout=15",
        "KillWait=5",
        "MinJobAge=300",
        # What is not in the file any more keeps its value when the file is read again. The first is the default.
        # Cancelled jobs count for MinJobAge: the benchmark of sweeps makes more than the default of 10,000 within that.
        "MaxArraySize=1001",
        "MaxJobCount=50000",
        "ReturnToService=2",
        "",
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={settings.controller_address}",
        f"AccountingStoragePort={slurmdbd}",
        f"AccountingStoragePass={cluster.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
        "",
    ]
    return "\n".join([*lines, *_plugin_dir(settings), *_resources(settings)]) + "\n"


def _resources(settings: Settings) -> list[str]:
    """The nodes and partitions."""
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    nodes = [
        f"NodeName=node{i} NodeAddr={settings.slow_address(i)} CPUs={settings.cpus} Sockets=1 "
        f"CoresPerSocket={settings.cpus} ThreadsPerCore=1 RealMemory={MEMORY_MB}{gres}"
        for i in range(settings.nodes)
    ]
    every_node = f"Nodes=node[0-{settings.nodes - 1}]"
    times = "DefaultTime=00:30:00 MaxTime=04:00:00"
    partitions = [
        f"PartitionName={name} {every_node} {options.format(grace=settings.grace)} {times}"
        for name, options in PARTITIONS.items()
    ]
    gpus = ["GresTypes=gpu", "AccountingStorageTRES=gres/gpu"] if settings.gpus else []
    return [*gpus, *nodes, *partitions]


def _plugin_dir(settings: Settings) -> list[str]:
    """Slurm would take the plugins of this machine's."""
    return [f"PluginDir={releases.plugins(releases.tree(settings.slurm))}"] if settings.slurm else []


def gres_conf(cluster: Cluster, settings: Settings) -> str:
    """Slurm hands out any device and sets CUDA_VISIBLE_DEVICES: those of this cluster lead to /dev/null."""
    if not settings.gpus:
        return ""
    return f"Name=gpu File={cluster.directory}/gpus/nvidia[0-{settings.gpus - 1}]\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """No cgroups: Slurm before 23.11 has no option for that, but its plugin for v1 touches none by itself."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(cluster: Cluster, settings: Settings) -> str:
    """The database is reached through a unix socket, whose path slurmdbd takes from its environment."""
    lines = [
        f"DbdHost={CONTROLLER}",
        f"DbdAddr={settings.controller_address}",
        f"DbdPort={settings.ports[2]}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={cluster.munge_socket}",
        f"PidFile={cluster.directory}/run/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
        *_plugin_dir(settings),
    ]
    return "\n".join(lines) + "\n"


def hosts(settings: Settings) -> str:
    """What is mounted over /etc/hosts for the controller and the nodes."""
    names = dict.fromkeys([CONTROLLER, socket.gethostname().partition(".")[0]])
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{settings.controller_address} {' '.join(names)}"]
    lines += [f"{settings.slow_address(i)} {node}" for i, node in enumerate(settings.names)]
    return "\n".join(lines) + "\n"


def nsswitch() -> str:
    """The machine's, but names of hosts come from files alone: each question to a dead DNS costs 10 s."""
    path = Path("/etc/nsswitch.conf")
    text = path.read_text() if path.exists() else "passwd: files\ngroup: files\n"
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("hosts:")]
    return "\n".join([*kept, "hosts: files"]) + "\n"


def slurm_version(cluster: Cluster) -> tuple[int, int]:
    """Of the cluster's Slurm, such as (22, 5)."""
    version = run(["slurmctld", "-V"], environment=cluster.environment).stdout
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _write_etc(etc: Path, settings: Settings) -> None:
    files = {"hosts": hosts(settings), "nsswitch.conf": nsswitch(), "resolv.conf": "# no DNS here\n"}
    etc.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        # Who runs already has the very file mounted, and would not see a new one.
        if not (etc / name).exists():
            write_file(etc / name, text)
