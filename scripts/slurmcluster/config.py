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


def write(cluster: Cluster, settings: Settings) -> None:
    """Write the files that are missing; those that are there stay as they are, whoever edited them."""
    directory = cluster.directory
    for name in ("run", "log", "gpus", "spool", *(f"spool/{node}" for node in settings.names)):
        (directory / name).mkdir(0o755, exist_ok=True)
    for name in ("keys", "ctld"):
        (directory / name).mkdir(0o700, exist_ok=True)
    for gpu in range(settings.gpus):
        device = directory / "gpus" / f"nvidia{gpu}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")
    # Slurm hands out any device and sets CUDA_VISIBLE_DEVICES: those of this cluster lead to /dev/null.
    gres = f"Name=gpu File={directory}/gpus/nvidia[0-{settings.gpus - 1}]\n" if settings.gpus else ""
    # No cgroups: Slurm before 23.11 has no option for that, but its plugin for v1 touches none by itself.
    plugin = "disabled" if slurm_version(cluster) >= (23, 11) else "cgroup/v1"
    files = {
        directory / "slurm.conf": (slurm_conf(cluster, settings), 0o644),
        directory / "gres.conf": (gres, 0o644),
        directory / "cgroup.conf": (f"CgroupPlugin={plugin}\n", 0o644),
        directory / "slurmdbd.conf": (slurmdbd_conf(cluster, settings), 0o600),
        directory / "keys/munge.key": (secrets.token_hex(64), 0o600),
        directory / "task-prolog": (faults.task_prolog(cluster), 0o755),
    }
    # Who runs already has the very file mounted, and would not see a new one.
    for etc in (directory / "etc", *(ETC / cluster.namespace(node) for node in settings.names)):
        etc.mkdir(parents=True, exist_ok=True)
        files[etc / "hosts"] = (hosts(settings), 0o644)
        files[etc / "nsswitch.conf"] = (nsswitch(), 0o644)
        files[etc / "resolv.conf"] = ("# no DNS here\n", 0o644)
    for path, (text, mode) in files.items():
        if not path.exists():
            write_file(path, text, mode)


def slurm_conf(cluster: Cluster, settings: Settings) -> str:
    """Short times throughout: what takes minutes on a site takes seconds here."""
    directory, (controller, slurmd, slurmdbd) = cluster.directory, settings.ports
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    resources = ["GresTypes=gpu", "AccountingStorageTRES=gres/gpu"] if settings.gpus else []
    resources += [
        f"NodeName=node{i} NodeAddr={settings.slow_address(i)} CPUs={settings.cpus} Sockets=1 "
        f"CoresPerSocket={settings.cpus} ThreadsPerCore=1 RealMemory={MEMORY_MB}{gres}"
        for i in range(settings.nodes)
    ]
    resources += [
        f"PartitionName={name} Nodes=node[0-{settings.nodes - 1}] {options.format(grace=settings.grace)} "
        "DefaultTime=00:30:00 MaxTime=04:00:00"
        for name, options in PARTITIONS.items()
    ]
    lines = "\n".join([*_plugin_dir(settings), *resources])
    return f"""\
ClusterName={cluster.name}
SlurmctldHost={CONTROLLER}({settings.controller_address})
SlurmctldPort={controller}
SlurmdPort={slurmd}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket},cred_expire=5
StateSaveLocation={directory}/ctld
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/%n.pid
MailProg=/bin/true
TaskProlog={directory}/task-prolog

# One kernel for all nodes: no cgroups, and more CPUs and memory claimed than there are.
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
MpiDefault=none

SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={MEMORY_MB // settings.cpus}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

SlurmdTimeout=15
KillWait=5
MinJobAge=300
# What is not in the file any more keeps its value when the file is read again. The first is the default.
# Cancelled jobs count for MinJobAge: the benchmark of sweeps makes more than the default of 10,000 within that.
MaxArraySize=1001
MaxJobCount=50000
ReturnToService=2

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={settings.controller_address}
AccountingStoragePort={slurmdbd}
AccountingStoragePass={cluster.munge_socket}
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5

{lines}
"""


def _plugin_dir(settings: Settings) -> list[str]:
    """Slurm would take the plugins of this machine's."""
    return [f"PluginDir={releases.plugins(releases.tree(settings.slurm))}"] if settings.slurm else []


def slurmdbd_conf(cluster: Cluster, settings: Settings) -> str:
    """The database is reached through a unix socket, whose path slurmdbd takes from its environment."""
    lines = "\n".join(_plugin_dir(settings))
    return f"""\
DbdHost={CONTROLLER}
DbdAddr={settings.controller_address}
DbdPort={settings.ports[2]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket}
PidFile={cluster.directory}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
{lines}
"""


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
