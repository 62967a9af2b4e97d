"""Which address and interface a node uses to meet the others."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

import psutil

from slurmtrain.errors import LaunchError

LOOPBACK = ("127.0.0.1", "lo")
# Bridges and tunnels of containers and virtual machines: they often carry the same address on every node.
_VIRTUAL = re.compile(r"(lo|docker|br-|veth|virbr|cni|flannel|cali|tun|tap|podman|lxc)")
# Reserved for documentation, so never on the local network: its route is the default route.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True, slots=True)
class Place:
    """An address of this node, and the interface that has it."""

    address: str
    interface: str


def home(pinned: str) -> Place:
    """Where node 0 listens: on the pinned interface, else on that of the default route, else on the first real one.

    Raises LaunchError where there is no such interface.
    """
    places = _places()
    if pinned != "auto":
        return _pinned(places, pinned)
    real = [place for place in places if not _VIRTUAL.match(place.interface)]
    source = _source_towards(_ELSEWHERE)
    chosen = next((place for place in real if place.address == source), None) or next(iter(real), None)
    if chosen is None:
        raise LaunchError(f"{socket.gethostname()} has no network interface that other nodes could reach")
    return chosen


def towards(address: str, pinned: str) -> Place:
    """Where another node talks to ``address`` from. Raises LaunchError where the pinned interface does not exist."""
    places = _places()
    if pinned != "auto":
        return _pinned(places, pinned)
    source = _source_towards(address)
    for place in [*places, Place(*LOOPBACK)]:
        if place.address == source:
            return place
    raise LaunchError(f"{socket.gethostname()} has no route to node 0 at {address}")


def _pinned(places: list[Place], name: str) -> Place:
    for place in [*places, Place(*LOOPBACK)]:
        if place.interface == name:
            return place
    there = ", ".join(sorted({place.interface for place in places})) or "none"
    raise LaunchError(
        f"network.interface is {name!r}, which {socket.gethostname()} does not have or which is down; it has {there}"
    )


def _places() -> list[Place]:
    """Addresses of interfaces that are up, by name, IPv4 before IPv6; no loopback and no link-local ones."""
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        for family in (socket.AF_INET, socket.AF_INET6):
            for each in addresses:
                if each.family == family and not _is_local(each.address):
                    found.append(Place(each.address, name))
    return found


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _source_towards(address: str) -> str | None:
    """The address that the kernel's routes choose for talking to another one. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
