"""Network namespaces, bridges and interfaces.

Both bridges are in a namespace of their own, the switch, where no firewall rule of the machine reaches; this machine
has one interface in the slow network. Each node has a port in either bridge.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cluster import MAX_INDEX, Cluster, Settings
from .processes import CannotHere, ClusterError, end_all, identity, inside, run

NAMESPACES = Path("/run/netns")
ETC = Path("/etc/netns")
DECOY = "172.17.0.1"
SLOW_RATE = "100mbit"
FAST_MTU = 9000


def free_index(unavailable: set[int]) -> int:
    """The first index whose networks nothing on this machine uses."""
    routes = [ipaddress.ip_network(route["dst"]) for route in _ip_json("route", "show") if route["dst"] != "default"]
    for index in range(MAX_INDEX):
        networks = [ipaddress.ip_network(subnet) for subnet in Settings(index=index).subnets]
        # A route for all of 10.0.0.0/8, as of a VPN, is narrowed by ours and does not matter.
        used = any(route.prefixlen >= 16 and route.overlaps(network) for route in routes for network in networks)
        if index not in unavailable and not used:
            return index
    raise CannotHere("all networks in 10.57.0.0/16 and 10.58.0.0/16 are in use here")


def ensure(cluster: Cluster, settings: Settings) -> bool:
    """Make the networks anew unless they are complete; returns whether the kernel could make the slow one slow."""
    limited = True
    if not _is_complete(cluster, settings):
        remove(cluster)
        _build_switch(cluster, settings)
        for i in range(settings.nodes):
            _build_node(cluster, settings, i)
            limited &= _limit(cluster, settings, i)
    plug(cluster, range(settings.nodes), True)
    return limited


def plug(cluster: Cluster, nodes: Iterable[int], plugged_in: bool) -> None:
    """Connect both cables of these nodes, or pull them."""
    state = "up" if plugged_in else "down"
    _batch(cluster.switch, "\n".join(f"link set {port}{node} {state}" for node in nodes for port in "sf"))


def node_identities(cluster: Cluster) -> set[tuple[int, int]]:
    """Of all namespaces of a cluster that are there."""
    identities = (identity(path) for path in NAMESPACES.glob(cluster.namespace_prefix + "*"))
    return {namespace for namespace in identities if namespace is not None}


def remove(cluster: Cluster) -> None:
    """Remove namespaces with all that runs and lies in them; /etc/netns is left."""
    end_all(lambda: inside(node_identities(cluster)))
    # First and by name: the kernel takes its time to dissolve a namespace and what is in it.
    run(["ip", "link", "del", cluster.uplink], check=False)
    for path in NAMESPACES.glob(cluster.namespace_prefix + "*"):
        run(["ip", "netns", "del", path.name])


def _build_switch(cluster: Cluster, settings: Settings) -> None:
    address, uplink = settings.controller_address, cluster.uplink
    if any(address in addresses for addresses in interfaces(None).values()):
        raise ClusterError(
            f"another cluster has the address {address} by now: run 'scripts/cluster down --name {cluster.name}', then "
            "'up' again"
        )
    try:
        _batch(None, f"netns add {cluster.switch}")
        _batch(
            cluster.switch,
            f"""link set lo up
                link add slow type bridge forward_delay 0
                link add fast mtu {FAST_MTU} type bridge forward_delay 0
                link set slow up
                link set fast up""",
        )
        _batch(None, f"link add {uplink} type veth peer name uplink netns {cluster.switch}")
    except ClusterError as error:
        remove(cluster)
        raise CannotHere(
            f"this machine does not let root make network namespaces, bridges and veths: {error}"
        ) from None
    _batch(None, f"addr add {address}/24 dev {uplink}\nlink set {uplink} up")
    _batch(cluster.switch, "link set uplink master slow up")


def _is_complete(cluster: Cluster, settings: Settings) -> bool:
    """Whether this machine, the switch and all nodes have their interfaces."""
    expected: dict[str | None, dict[str, set[str]]] = {
        None: {cluster.uplink: {settings.controller_address}},
        cluster.switch: {name: set() for name in ("slow", "fast", "uplink")},
    }
    for i, node in enumerate(settings.names):
        expected[cluster.namespace(node)] = {
            "lo": {"127.0.0.1"},
            "eno1": {settings.slow_address(i)},
            settings.fast_interface(i): {settings.fast_address(i)},
            "docker0": {DECOY},
        }
    return all(links.items() <= interfaces(namespace).items() for namespace, links in expected.items())


def _build_node(cluster: Cluster, settings: Settings, i: int) -> None:
    name, fast = cluster.namespace(settings.names[i]), settings.fast_interface(i)
    _batch(None, f"netns add {name}")
    _batch(
        cluster.switch,
        f"""link add s{i} type veth peer name eno1 netns {name}
            link add f{i} mtu {FAST_MTU} type veth peer name {fast} mtu {FAST_MTU} netns {name}
            link set s{i} master slow up
            link set f{i} master fast up""",
    )
    # Docker's interface has one address on every machine: a trap for whoever picks an interface. The second half of
    # the pair is what would be a container's, and gives it a carrier.
    _batch(
        name,
        f"""link set lo up
            addr add {settings.slow_address(i)}/24 dev eno1
            link set eno1 up
            addr add {settings.fast_address(i)}/24 dev {fast}
            link set {fast} up
            link add docker0 type bridge forward_delay 0
            link add veth0 type veth peer name veth1
            link set veth0 master docker0 up
            link set veth1 up
            addr add {DECOY}/16 dev docker0
            link set docker0 up""",
    )


def _limit(cluster: Cluster, settings: Settings, i: int) -> bool:
    """Make a node's cable in the slow network slow, in both directions; not every kernel can."""
    ends = ((cluster.switch, f"s{i}"), (cluster.namespace(settings.names[i]), "eno1"))
    rule = ("root", "tbf", "rate", SLOW_RATE, "burst", "128kb", "latency", "50ms")
    added = [run(["tc", "-n", space, "qdisc", "add", "dev", port, *rule], check=False) for space, port in ends]
    return all(done.returncode == 0 for done in added)


def interfaces(namespace: str | None) -> dict[str, set[str]]:
    """The interfaces that are up, with their IPv4 addresses; none where the namespace is missing."""
    return {
        link["ifname"]: {address["local"] for address in link["addr_info"] if address["family"] == "inet"}
        for link in _ip_json("addr", "show", namespace=namespace)
        if "UP" in link.get("flags", ())
    }


def _ip_json(*command: str, namespace: str | None = None) -> list[dict[str, Any]]:
    completed = run(["ip", "-j", *_in(namespace), *command], check=False)
    objects: list[dict[str, Any]] = json.loads(completed.stdout or "[]") if completed.returncode == 0 else []
    return objects


def _batch(namespace: str | None, commands: str) -> None:
    """Run commands of ``ip``, one a line."""
    completed = run(["ip", *_in(namespace), "-batch", "-"], stdin=f"{commands}\n", check=False)
    if completed.returncode != 0:
        shown = "; ".join(line.strip() for line in commands.splitlines())
        raise ClusterError(f"ip could not do all of '{shown}': {' '.join(completed.stderr.strip().splitlines())}")


def _in(namespace: str | None) -> list[str]:
    return ["-n", namespace] if namespace else []
