"""Network namespaces, bridges and interfaces.

Both bridges are in a namespace of their own, the switch, where no firewall rule of the machine reaches; this machine
has one interface in the slow network. Each node has a port in either bridge. Whatever is there and complete is left as
it is, so that all of this can be done again.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .cluster import MAX_INDEX, Cluster, Settings
from .errors import CannotHere, ClusterError
from .processes import end_all, identity, inside, run

NAMESPACES = Path("/run/netns")
ETC = Path("/etc/netns")
DECOY = "172.17.0.1"
SLOW_RATE = "100mbit"
FAST_MTU = 9000
HOST = "this machine"
CLONE_NEWNET = 0x40000000


def free_index(unavailable: set[int]) -> int:
    """The first index whose networks and ports nothing on this machine uses."""
    routes = [ipaddress.ip_network(route["dst"]) for route in _ip_json("route", "show") if route["dst"] != "default"]
    for index in range(MAX_INDEX):
        settings = Settings(index=index)
        networks = [ipaddress.ip_network(subnet) for subnet in settings.subnets]
        # A route for all of 10.0.0.0/8, as of a VPN, is narrowed by ours and does not matter.
        used = any(route.prefixlen >= 16 and route.overlaps(network) for route in routes for network in networks)
        if index not in unavailable and not used and all(map(_port_is_free, settings.ports)):
            return index
    raise CannotHere("all networks in 10.57.0.0/16 and 10.58.0.0/16, or the ports from 16817 on, are in use here")


def ensure(cluster: Cluster, settings: Settings) -> bool:
    """Make what is missing of the networks; returns whether the kernel could make the slow one slow."""
    limited = True
    if not _switch_is_complete(cluster, settings):
        remove(cluster)
        _build_switch(cluster, settings)
    for i, node in enumerate(settings.names):
        if not _node_is_complete(cluster, settings, i):
            _remove_node(cluster, i, node)
            _build_node(cluster, settings, i)
            limited &= _limit(cluster, i, node)
    plug(cluster, range(settings.nodes), True)
    return limited


def plug(cluster: Cluster, nodes: Iterable[int], plugged_in: bool) -> None:
    """Connect both cables of these nodes, or pull them."""
    state = "up" if plugged_in else "down"
    _batch(cluster.switch, [f"link set {port} {state}" for node in nodes for port in (f"s{node}", f"f{node}")])


def check(cluster: Cluster, settings: Settings) -> None:
    """Raise unless this machine and all nodes reach each other by TCP."""
    for network, address in (("slow", settings.slow_address), ("fast", settings.fast_address)):
        with ExitStack() as stack:
            listening: dict[str, tuple[str, int]] = {}
            for i, node in enumerate(settings.names):
                with _entered(NAMESPACES / cluster.namespace(node)):
                    server = stack.enter_context(socket.create_server((address(i), 0), backlog=MAX_INDEX))
                listening[node] = server.getsockname()
            for node in settings.names:
                with _entered(NAMESPACES / cluster.namespace(node)):
                    _connect_all(node, network, listening)
            if network == "slow":
                _connect_all(HOST, network, listening)
    with socket.create_server((settings.controller_address, 0)) as server:
        for node in settings.names:
            with _entered(NAMESPACES / cluster.namespace(node)):
                _connect_all(node, "slow", {HOST: server.getsockname()})


def node_identities(cluster: Cluster) -> set[tuple[int, int]]:
    """Of all namespaces of a cluster that are there."""
    identities = (identity(path) for path in NAMESPACES.glob(cluster.namespace_prefix + "*"))
    return {namespace for namespace in identities if namespace is not None}


def leftovers(cluster: Cluster) -> list[Path]:
    """Namespaces and their files in /etc, and the interface: all that must be gone after ``down``."""
    pattern = cluster.namespace_prefix + "*"
    uplink = Path("/sys/class/net", cluster.uplink)
    return [*NAMESPACES.glob(pattern), *ETC.glob(pattern), *([uplink] if uplink.exists() else [])]


def remove(cluster: Cluster) -> None:
    """Remove namespaces with all that runs and lies in them; /etc/netns is left."""
    end_all(lambda: inside(node_identities(cluster)))
    # First and by name: the kernel takes its time to dissolve a namespace and what is in it.
    run(["ip", "link", "del", cluster.uplink], check=False)
    for path in NAMESPACES.glob(cluster.namespace_prefix + "*"):
        run(["ip", "netns", "del", path.name])


def _build_switch(cluster: Cluster, settings: Settings) -> None:
    try:
        _batch(None, [f"netns add {cluster.switch}"])
        _batch(
            cluster.switch,
            [
                "link set lo up",
                "link add slow type bridge forward_delay 0",
                f"link add fast mtu {FAST_MTU} type bridge forward_delay 0",
                "link set slow up",
                "link set fast up",
            ],
        )
        _batch(None, [f"link add {cluster.uplink} type veth peer name uplink netns {cluster.switch}"])
    except ClusterError as error:
        remove(cluster)
        raise CannotHere(
            f"this machine does not let root make network namespaces, bridges and veths: {error}"
        ) from None
    if any(settings.controller_address in addresses for addresses in interfaces(None).values()):
        raise ClusterError(
            f"another cluster has the address {settings.controller_address} by now: run 'scripts/cluster down "
            f"--name {cluster.name}', then 'up' again"
        )
    uplink = cluster.uplink
    _batch(None, [f"addr add {settings.controller_address}/24 dev {uplink}", f"link set {uplink} up"])
    _batch(cluster.switch, ["link set uplink master slow up"])


def _switch_is_complete(cluster: Cluster, settings: Settings) -> bool:
    switch, on_host = interfaces(cluster.switch), interfaces(None)
    bridged = {"slow", "fast", "uplink"} <= switch.keys()
    return bridged and on_host.get(cluster.uplink) == {settings.controller_address}


def _build_node(cluster: Cluster, settings: Settings, i: int) -> None:
    name, fast = cluster.namespace(settings.names[i]), settings.fast_interface(i)
    _batch(None, [f"netns add {name}"])
    _batch(
        cluster.switch,
        [
            f"link add s{i} type veth peer name eno1 netns {name}",
            f"link add f{i} mtu {FAST_MTU} type veth peer name {fast} mtu {FAST_MTU} netns {name}",
            f"link set s{i} master slow up",
            f"link set f{i} master fast up",
        ],
    )
    # Docker's interface has one address on every machine: a trap for whoever picks an interface. The second half of
    # the pair is what would be a container's, and gives it a carrier.
    _batch(
        name,
        [
            "link set lo up",
            f"addr add {settings.slow_address(i)}/24 dev eno1",
            "link set eno1 up",
            f"addr add {settings.fast_address(i)}/24 dev {fast}",
            f"link set {fast} up",
            "link add docker0 type bridge forward_delay 0",
            "link add veth0 type veth peer name veth1",
            "link set veth0 master docker0 up",
            "link set veth1 up",
            f"addr add {DECOY}/16 dev docker0",
            "link set docker0 up",
        ],
    )


def _limit(cluster: Cluster, i: int, node: str) -> bool:
    """Make a node's cable in the slow network slow, in both directions; not every kernel can."""
    ends = ((cluster.switch, f"s{i}"), (cluster.namespace(node), "eno1"))
    rule = ("root", "tbf", "rate", SLOW_RATE, "burst", "128kb", "latency", "50ms")
    added = [run(["tc", "-n", space, "qdisc", "add", "dev", port, *rule], check=False) for space, port in ends]
    return all(done.returncode == 0 for done in added)


def _node_is_complete(cluster: Cluster, settings: Settings, i: int) -> bool:
    existing = interfaces(cluster.namespace(settings.names[i]))
    expected = {
        "lo": {"127.0.0.1"},
        "eno1": {settings.slow_address(i)},
        settings.fast_interface(i): {settings.fast_address(i)},
        "docker0": {DECOY},
    }
    return expected.items() <= existing.items()


def _remove_node(cluster: Cluster, i: int, node: str) -> None:
    path = NAMESPACES / cluster.namespace(node)
    namespace_id = identity(path)
    if namespace_id:
        end_all(lambda: inside({namespace_id}))
    for port in (f"s{i}", f"f{i}"):
        run(["ip", "-n", cluster.switch, "link", "del", port], check=False)
    if path.exists():
        run(["ip", "netns", "del", path.name])


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


def _batch(namespace: str | None, commands: list[str]) -> None:
    completed = run(["ip", *_in(namespace), "-batch", "-"], stdin="\n".join(commands) + "\n", check=False)
    if completed.returncode != 0:
        message = " ".join(completed.stderr.strip().splitlines())
        raise ClusterError(f"ip could not do all of '{'; '.join(commands)}': {message}")


def _in(namespace: str | None) -> list[str]:
    return ["-n", namespace] if namespace else []


def _port_is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


@contextmanager
def _entered(namespace: Path) -> Iterator[None]:
    """Sockets made in here are the namespace's, and stay so."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(namespace, os.O_RDONLY)
    try:
        _set_namespace(other)
        try:
            yield
        finally:
            _set_namespace(own)
    finally:
        os.close(own)
        os.close(other)


def _set_namespace(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _connect_all(source: str, network: str, listening: dict[str, tuple[str, int]]) -> None:
    for target, address in listening.items():
        try:
            socket.create_connection(address, timeout=3).close()
        except OSError as error:
            hint = (
                "a firewall of this machine may be in the way: let it accept what comes from and goes to 10.57.0.0/16"
                if HOST in (source, target)
                else "somebody may have changed the cluster's interfaces or routes: run 'down', then 'up' again"
            )
            raise ClusterError(
                f"{source} cannot reach {target} ({address[0]}) over the {network} network: {error}; {hint}"
            ) from None
