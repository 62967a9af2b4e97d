"""What there is of a cluster."""

from __future__ import annotations

import contextlib
from collections import Counter

from . import daemons, slurm
from .cluster import Cluster, Settings
from .network import NAMESPACES
from .processes import ClusterError


def read(cluster: Cluster, settings: Settings) -> tuple[bool, str]:
    """Whether everything runs and every node is usable, and a text about it."""
    pids = daemons.running(cluster)
    jobs: Counter[str] = Counter()
    current: dict[str, slurm.Node] = {}
    if "slurmctld" in pids and "munged" in pids:
        current = slurm.nodes(cluster)
        with contextlib.suppress(ClusterError):
            jobs = Counter(job.state.lower() for job in slurm.jobs(cluster))
    is_up = all(name in pids for name in daemons.NAMES)
    rows = [("NODE", "STATE", "SLURMD", "SLOW", "FAST", "NAMESPACE")]
    for i, name in enumerate(settings.names):
        node, namespace = current.get(name, slurm.MISSING), cluster.namespace(name)
        pid = pids.get(name) if (NAMESPACES / namespace).exists() else None
        is_up = is_up and pid is not None and node.is_usable
        rows.append((name, node.state, str(pid or "-"), settings.slow_address(i), settings.fast_address(i), namespace))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"cluster {cluster.name}: {'up' if is_up else 'not all of it is up'}",
        f"SLURM_CONF {cluster.slurm_conf}",
        f"daemons    {', '.join(f'{name} {pids.get(name)}' for name in daemons.NAMES)}",
        f"jobs       {', '.join(f'{count} {state}' for state, count in sorted(jobs.items())) or 'none'}",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    return is_up, "\n".join(lines)
