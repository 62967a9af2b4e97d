"""Which network an attempt trains over: what the nodes have, what was proved of it, and the choice. Pure.

A network is one address for each node. Nothing tells which interfaces of several machines are connected, least of all
their names; so a few guesses are made, and each is proved by real connections before one is elected.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Up to here every node tries every other; beyond, each tries the powers of two before and behind it, and node 0 all.
ALL_PAIRS = 16
# So many networks are proved; nodes with many rails have as many networks, which are alike.
_PROVED = 4
# A measured rate within this factor of the best counts as equal: rates are noisy, and the choice is to be stable.
_EQUAL_RATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An address that a node could train over. ``kind``: ethernet or infiniband; ``speed_mbps`` as the kernel says."""

    interface: str
    address: str
    prefix: int
    kind: str = "ethernet"
    speed_mbps: int | None = None
    mtu: int = 1500

    @property
    def family(self) -> int:
        return 6 if ":" in self.address else 4

    @property
    def subnet(self) -> str:
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedAddress:
    """An address that is none to train over, and why."""

    node: int
    interface: str
    address: str
    why: str


@dataclass(frozen=True, slots=True)
class Network:
    """One address for each node, by number. ``pinned``: it is what the spec asks for."""

    name: str
    members: Mapping[int, Candidate]
    pinned: bool = False

    @property
    def family(self) -> int:
        return self.members[0].family

    @property
    def speed_mbps(self) -> int | None:
        """Of the slowest node; None where the kernel of any does not say."""
        speeds = [member.speed_mbps for member in self.members.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    @property
    def mtu(self) -> int:
        return min(member.mtu for member in self.members.values())

    @property
    def kind(self) -> str:
        kinds = {member.kind for member in self.members.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def interfaces(self) -> Mapping[int, str]:
        return {node: member.interface for node, member in self.members.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProblem:
    """What went wrong between two nodes: ``source`` tried to reach ``target``."""

    source: int
    target: int
    why: str


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """What a node says of itself: its candidates, and the address by which it reached node 0, and node 0's then."""

    candidates: Sequence[Candidate]
    via: str | None = None
    home: str | None = None


@dataclass(frozen=True, slots=True)
class ProbedNetwork:
    """A network after its proof. ``rate``: bytes a second between neighbours, where it was measured."""

    network: Network
    problems: Sequence[NetworkProblem] = ()
    rate: float | None = None

    @property
    def proved(self) -> bool:
        return not self.problems


def candidate_networks(
    places: Mapping[int, NodeAddresses], pinned: str | None
) -> tuple[list[Network], list[ExcludedAddress]]:
    """The networks that these nodes may have in common, the most promising ones, and what was left out.

    ``pinned``: the interface that the spec names, on every node.
    """
    excluded = list(_shared_addresses(places))
    bad = {(one.node, one.address) for one in excluded}
    usable = {
        node: [one for one in place.candidates if (node, one.address) not in bad] for node, place in places.items()
    }
    found: dict[tuple[str, ...], Network] = {}
    for name, members in _guesses(places, usable):
        key = _addresses(members)
        if len(members) == len(places):
            wanted = {member.interface for member in members.values()} == {pinned}
            found.setdefault(key, Network(name, dict(sorted(members.items())), wanted))
    # How the nodes found node 0 is known to work: it is kept whatever it promises.
    known = _addresses(_by_route(places, usable))
    kept = sorted(found.items(), key=lambda item: _order(ProbedNetwork(item[1]), ()))
    return [one for index, (key, one) in enumerate(kept) if index < _PROVED or key == known], excluded


def nodes_without_interface(places: Mapping[int, NodeAddresses], pinned: str) -> list[int]:
    """Nodes without a usable address on the pinned interface."""
    return [node for node, place in places.items() if not any(c.interface == pinned for c in place.candidates)]


def probe_targets(node: int, nodes: int) -> list[int]:
    """Whom a node connects to. Every pair up to ALL_PAIRS nodes; then a ring, strides of powers of two, and node 0.

    With A in B's list, B is in A's, so that each connection is tried in both directions; only node 0, which everybody
    connects to as to the store later, does not call all of them back. At most 2 log2(nodes) + 1 connections a node.
    """
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != node]
    strides = [1 << power for power in range((nodes - 1).bit_length()) if 1 << power <= nodes // 2]
    near = {(node + step) % nodes for step in strides} | {(node - step) % nodes for step in strides}
    return sorted((near | {0}) - {node})


def networks_to_rate(tried: Sequence[ProbedNetwork]) -> list[int]:
    """Of which networks the rate has to be measured: those that nothing else tells apart."""
    proved = [index for index, one in enumerate(tried) if one.proved]
    speeds = [speed for index in proved if (speed := tried[index].network.speed_mbps) is not None]
    best = [i for i in proved if tried[i].network.speed_mbps in (None, max(speeds, default=None))]
    # The same interfaces have the same rate in either family.
    first = {tuple(sorted(tried[i].network.interfaces.items())): i for i in reversed(best)}
    return sorted(first.values()) if len(first) > 1 else []


def elect(tried: Sequence[ProbedNetwork]) -> int | None:
    """The index of the best network: proved, then pinned, then fast, then by a stable name. None where none is proved.

    The speed is the kernel's word; where that does not tell, the measured rate does, then the MTU. IPv4 comes first.
    """
    proved = [index for index, one in enumerate(tried) if one.proved]
    return min(proved, key=lambda index: _order(tried[index], tried), default=None)


def better_unproved_networks(tried: Sequence[ProbedNetwork], elected: int) -> list[ProbedNetwork]:
    """Networks that would have been faster than the elected one, or were asked for, had they been proved."""
    chosen = tried[elected].network

    def better(one: ProbedNetwork) -> bool:
        speed, ours = one.network.speed_mbps, chosen.speed_mbps
        faster = speed is not None and ours is not None and speed > ours
        same = one.network.interfaces == chosen.interfaces
        alike = speed == ours or speed is None or ours is None
        return not same and (faster or one.network.pinned or (alike and one.network.mtu > chosen.mtu))

    return [one for one in tried if not one.proved and better(one)]


def culprits(problems: Iterable[NetworkProblem], nodes: int) -> list[int]:
    """The fewest nodes without which no problem would be left, if that is certainly the only such choice; else nobody.

    It is where each of them, once those before it are left out, has problems with more others than there are culprits
    left: to blame these others instead would take more nodes. A single pair that does not reach each other says nothing
    about which of the two is at fault; nor do two nodes.
    """
    edges = {frozenset((one.source, one.target)) for one in problems}
    blamed: list[int] = []
    others: list[int] = []
    while edges:
        [(worst, count)] = Counter(node for edge in edges for node in edge).most_common(1)
        # No node accounts for more than that one does, so that this many are left at least.
        if count <= len(edges) / count:
            return []
        blamed.append(worst)
        others.append(count)
        edges = {edge for edge in edges if worst not in edge}
    certain = all(count > len(blamed) - index for index, count in enumerate(others))
    return sorted(blamed) if certain and len(blamed) * 2 < nodes else []


def natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts eth2 before eth10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part)


def _guesses(
    places: Mapping[int, NodeAddresses], usable: Mapping[int, Sequence[Candidate]]
) -> Iterator[tuple[str, dict[int, Candidate]]]:
    """Names and members of what may be networks: by subnet, by name, by speed, by the route that was taken."""
    for family in (4, 6):
        there = {node: [one for one in some if one.family == family] for node, some in usable.items()}
        first = there.get(0, [])
        for subnet in dict.fromkeys(one.subnet for one in first):
            yield subnet, _choose(there, lambda one, subnet=subnet: one.subnet == subnet)
        for name in dict.fromkeys(one.interface for one in first):
            yield f"interface {name}", _choose(there, lambda one, name=name: one.interface == name)
        yield f"the fastest of each node (IPv{family})", _choose(there, lambda _: True)
    yield "the route to node 0", _by_route(places, usable)


def _addresses(members: Mapping[int, Candidate]) -> tuple[str, ...]:
    return tuple(members[node].address for node in sorted(members))


def _choose(there: Mapping[int, Sequence[Candidate]], matches: Any) -> dict[int, Candidate]:
    """Of each node's matching candidates the fastest."""
    chosen = {}
    for node, some in there.items():
        matching = [one for one in some if matches(one)]
        if matching:
            chosen[node] = min(
                matching, key=lambda one: (-(one.speed_mbps or 0), -one.mtu, natural_sort_key(one.interface))
            )
    return chosen


def _by_route(places: Mapping[int, NodeAddresses], usable: Mapping[int, Sequence[Candidate]]) -> dict[int, Candidate]:
    """How the nodes found node 0: it works already, though nothing else may be known of it."""
    homes = Counter(place.home for place in places.values() if place.home is not None).most_common(1)
    wanted = {node: place.via for node, place in places.items()}
    wanted[0] = homes[0][0] if homes else None
    return {
        node: one for node, some in usable.items() for one in some if one.address == wanted[node]
    }  # fmt: skip


def _shared_addresses(places: Mapping[int, NodeAddresses]) -> Iterator[ExcludedAddress]:
    """Addresses that several nodes have: bridges of containers, which lead nowhere."""
    owners: dict[str, list[int]] = {}
    for node, place in places.items():
        for one in place.candidates:
            owners.setdefault(one.address, []).append(node)
    for node, place in places.items():
        for one in place.candidates:
            count = len(set(owners[one.address]))
            if count > 1:
                why = f"{count} nodes have this address"
                yield ExcludedAddress(node=node, interface=one.interface, address=one.address, why=why)


def _order(one: ProbedNetwork, tried: Sequence[ProbedNetwork]) -> tuple[Any, ...]:
    """Sorts the best network first, among others that were tried."""
    best_rate = max((other.rate or 0.0 for other in tried if other.proved), default=0.0)
    rate = one.rate if one.rate is not None else _rate_of_same(one, tried)
    fast = rate is None or rate * _EQUAL_RATE >= best_rate
    speed = one.network.speed_mbps
    names = sorted(natural_sort_key(name) for name in set(one.network.interfaces.values()))
    return (not one.network.pinned, -(speed if speed is not None else _best_speed(tried)), not fast,
            -one.network.mtu, one.network.family, names, one.network.name)  # fmt: skip


def _rate_of_same(one: ProbedNetwork, tried: Sequence[ProbedNetwork]) -> float | None:
    """The rate of a network of the other family over the same interfaces."""
    same = (other.rate for other in tried if other.network.interfaces == one.network.interfaces)
    return next((rate for rate in same if rate is not None), None)


def _best_speed(tried: Sequence[ProbedNetwork]) -> int:
    speeds = (one.network.speed_mbps for one in tried if one.proved)
    return max((speed for speed in speeds if speed is not None), default=0)
