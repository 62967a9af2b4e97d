"""Interfaces of nodes, and the candidate networks that they form."""

from __future__ import annotations

from slurmtrain.model.preflight.election import (
    Candidate,
    Network,
)

GIGABIT = 1000


def card(interface: str, address: str, prefix: int = 24, speed: int | None = GIGABIT, mtu: int = 1500) -> Candidate:
    kind = "infiniband" if interface.startswith("ib") else "ethernet"
    return Candidate(interface=interface, address=address, prefix=prefix, speed_mbps=speed, mtu=mtu, kind=kind)


def addresses(make_network: Network) -> list[str]:
    return [member.address for member in make_network.members.values()]


def make_network(
    name: str = "n",
    interface: str = "eth0",
    speed: int | None = GIGABIT,
    mtu: int = 1500,
    family: int = 4,
    pinned: bool = False,
) -> Network:
    first = "10.0.0" if family == 4 else "fd00:"
    separator = "." if family == 4 else ":"
    members = {node: card(interface, f"{first}{separator}{node + 1}", speed=speed, mtu=mtu) for node in range(2)}
    return Network(name, members, pinned)
