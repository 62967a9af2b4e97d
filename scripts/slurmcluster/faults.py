"""Breaking a cluster on purpose: networks that lose packets, clocks that are wrong."""

from __future__ import annotations

from pathlib import Path

from . import network
from .cluster import Cluster, write_file
from .processes import ClusterError, WrongInput, run

_TABLE = "slurmtrain"
_HOOKS = {"in": ("input", "iifname"), "out": ("output", "oifname")}
_FAKETIME = "faketime/libfaketimeMT.so.1"


def task_prolog(cluster: Cluster) -> str:
    """A script that Slurm asks, on each node, for variables of every task that srun starts there."""
    return f"""#!/bin/sh
# A node whose clock is to be wrong has a file here that says how many seconds it is ahead.
seconds=$(cat {cluster.directory}/clocks/"$SLURMD_NODENAME" 2>/dev/null) || exit 0
echo "export LD_PRELOAD=$(ls /usr/lib/*/{_FAKETIME} | head -n 1)"
echo "export FAKETIME=$seconds"
# Only what time it is: not how long things take, and not when files were written.
echo "export FAKETIME_DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1"
"""


def shift_clock(cluster: Cluster, node: int, seconds: float) -> None:
    """Set the clock of a node's tasks ahead, or back; 0 puts it right."""
    path = cluster.directory / "clocks" / cluster.node(node)
    if seconds == 0:
        path.unlink(missing_ok=True)
        return
    if not list(Path("/usr/lib").glob(f"*/{_FAKETIME}")):
        raise ClusterError("libfaketime is not installed: 'apt-get install faketime'")
    path.parent.mkdir(mode=0o755, exist_ok=True)
    write_file(path, f"{seconds:+g}s\n", 0o644)


def break_network(cluster: Cluster, node: int, interface: str, directions: list[str]) -> None:
    """Drop every packet that comes in, or goes out, over one interface of a node, which stays up."""
    namespace = cluster.namespace(cluster.node(node))
    if interface not in network.interfaces(namespace):
        existing = ", ".join(sorted(network.interfaces(namespace)))
        raise WrongInput(f"node{node} has no interface {interface!r} that is up; it has {existing}")
    rules = [f"add table inet {_TABLE}"]
    for direction in directions:
        hook, name = _HOOKS[direction]
        rules += [
            f"add chain inet {_TABLE} {hook} {{ type filter hook {hook} priority 0; }}",
            f'add rule inet {_TABLE} {hook} {name} "{interface}" drop',
        ]
    loaded = run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], stdin="\n".join(rules) + "\n", check=False)
    if loaded.returncode != 0:
        raise ClusterError(f"nft could not block {interface} of node{node}: {loaded.stderr.strip()}")


def mend_network(cluster: Cluster, node: int) -> None:
    """Undo all that was broken of a node's networks."""
    namespace = cluster.namespace(cluster.node(node))
    run(["ip", "netns", "exec", namespace, "nft", "delete", "table", "inet", _TABLE], check=False)
