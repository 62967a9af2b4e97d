"""What there is of a cluster."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from . import daemons, slurm
from .cluster import Cluster, Settings
from .errors import ClusterError
from .network import NAMESPACES


@dataclass(frozen=True)
class NodeStatus:
    """A node, with the pid of its slurmd."""

    name: str
    state: str
    slurmd: int | None
    slow_address: str
    fast_address: str
    namespace: str


@dataclass(frozen=True)
class Status:
    """A cluster; ``up`` means that everything runs and every node is usable."""

    name: str
    up: bool
    slurm_conf: str
    nodes: list[NodeStatus]
    daemons: dict[str, int | None]
    jobs: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """For ``status --json``."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        jobs = ", ".join(f"{count} {state.lower()}" for state, count in sorted(self.jobs.items())) or "none"
        rows = [("NODE", "STATE", "SLURMD", "SLOW", "FAST", "NAMESPACE")]
        rows += [
            (node.name, node.state, _pid(node.slurmd), node.slow_address, node.fast_address, node.namespace)
            for node in self.nodes
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"cluster {self.name}: {'up' if self.up else 'not all of it is up'}",
            f"SLURM_CONF {self.slurm_conf}",
            f"daemons    {', '.join(f'{name} {_pid(pid)}' for name, pid in self.daemons.items())}",
            f"jobs       {jobs}",
            "",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]


def read(cluster: Cluster, settings: Settings) -> Status:
    """Look at processes, and ask Slurm where it runs."""
    pids = daemons.running(cluster)
    for name in settings.names:
        if not (NAMESPACES / cluster.namespace(name)).exists():
            pids.pop(name, None)
    jobs: dict[str, int] = {}
    current: dict[str, slurm.Node] = {}
    if "slurmctld" in pids and "munged" in pids:
        current = slurm.nodes(cluster)
        with contextlib.suppress(ClusterError):
            jobs = slurm.job_counts(cluster)
    nodes = [
        NodeStatus(
            name,
            current.get(name, slurm.MISSING).state,
            pids.get(name),
            settings.slow_address(i),
            settings.fast_address(i),
            cluster.namespace(name),
        )
        for i, name in enumerate(settings.names)
    ]
    ups = [
        *(name in pids for name in daemons.NAMES),
        *(node.slurmd is not None and current.get(node.name, slurm.MISSING).is_usable for node in nodes),
    ]
    return Status(
        name=cluster.name,
        up=all(ups),
        slurm_conf=str(cluster.slurm_conf),
        nodes=nodes,
        daemons={name: pids.get(name) for name in daemons.NAMES},
        jobs=jobs,
    )


def _pid(pid: int | None) -> str:
    return "-" if pid is None else str(pid)
