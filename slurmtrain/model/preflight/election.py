"""Which network an attempt trains over: guesses from the nodes' addresses, results of their probes, and the choice.

A network is one address for each node. Nothing says which interfaces of several machines are connected, least of all
their names; so a few networks are guessed, and each is probed with real connections before one is elected. Pure.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.hostlist import natural_sort_key

# Up to this many nodes, each probes every other; with more, only nodes at distances of powers of two, and node 0.
ALL_PAIRS = 16
# At most this many networks are probed: nodes with many rails have as many networks, all alike.
_MAX_PROBED = 4
# A measured rate within this factor of the best counts as equal: rates are noisy, and the choice should be stable.
_EQUAL_RATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An address that a node could train over.

    ``prefix`` is its length in bits. ``kind`` is ethernet or infiniband. ``speed_mbps`` is what the kernel says, None
    if it does not know.
    """

    interface: str
    address: str
    prefix: int
    kind: str = "ethernet"
    speed_mbps: int | None = None
    mtu: int = 1500

    @property
    def family(self) -> int:
        """The IP version, 4 or 6."""
        return 6 if ":" in self.address else 4

    @property
    def subnet(self) -> str:
        """The address's subnet, such as ``10.0.0.0/24``."""
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedAddress:
    """An address that a node cannot train over, and the reason."""

    node: int
    interface: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Network:
    """One address for each node, by number.

    ``pinned``: it is the interface that the spec names. ``problems``: what probes found wrong with it. ``rate``: bytes
    a second of the slowest link, if measured.
    """

    name: str
    members: Mapping[int, Candidate]
    pinned: bool = False
    problems: Sequence[NetworkProblem] = ()
    rate: float | None = None

    @property
    def proved(self) -> bool:
        """Whether no probe has failed."""
        return not self.problems

    @property
    def family(self) -> int:
        """The IP version, 4 or 6, which is the same on all nodes."""
        return self.members[0].family

    @property
    def speed_mbps(self) -> int | None:
        """The speed of the slowest node; None if the kernel of any does not know it."""
        speeds = [member.speed_mbps for member in self.members.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    @property
    def mtu(self) -> int:
        """The largest packet in bytes that all nodes can send."""
        return min(member.mtu for member in self.members.values())

    @property
    def kind(self) -> str:
        """The kind of all its interfaces: ethernet, infiniband or mixed."""
        kinds = {member.kind for member in self.members.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def interfaces(self) -> Mapping[int, str]:
        """The interface of each node."""
        return {node: member.interface for node, member in self.members.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProblem:
    """Why a probe of one node, ``source``, did not reach another, ``target``."""

    source: int
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """The addresses of one node.

    ``own_address`` and ``coordinator_address`` are the two ends of its preflight connection to node 0; None on node 0
    itself.
    """

    candidates: Sequence[Candidate]
    own_address: str | None = None
    coordinator_address: str | None = None


def candidate_networks(
    addresses: Mapping[int, NodeAddresses], pinned: str | None
) -> tuple[list[Network], list[ExcludedAddress]]:
    """The networks that these nodes may have in common, the most promising first, and addresses that were left out.

    ``addresses`` are by node. ``pinned``: the interface that the spec names, on every node.
    """
    owners: defaultdict[str, set[int]] = defaultdict(set)
    for node, own in addresses.items():
        for candidate in own.candidates:
            owners[candidate.address].add(node)
    excluded = []
    usable: dict[int, list[Candidate]] = {node: [] for node in addresses}
    for node, own in addresses.items():
        for each in own.candidates:
            # Addresses that several nodes have are bridges of containers, which lead to no other node.
            if (count := len(owners[each.address])) > 1:
                why = f"{count} nodes have this address"
                excluded.append(ExcludedAddress(node=node, interface=each.interface, address=each.address, reason=why))
            else:
                usable[node].append(each)
    networks: dict[tuple[str, ...], Network] = {}
    for name, members in _guesses(addresses, usable):
        if len(members) == len(addresses):
            is_pinned = {member.interface for member in members.values()} == {pinned}
            # Several guesses may yield the same addresses: the first has the most descriptive name.
            networks.setdefault(_address_key(members), Network(name, dict(sorted(members.items())), is_pinned))
    # The addresses over which the nodes found node 0 are known to work: that network is kept however it ranks.
    working = _address_key(_members_by_route(addresses, usable))
    ranked = sorted(networks.items(), key=lambda item: _merit(item[1], ()))
    kept = [network for index, (key, network) in enumerate(ranked) if index < _MAX_PROBED or key == working]
    return kept, excluded


def nodes_without_interface(addresses: Mapping[int, NodeAddresses], pinned: str) -> list[int]:
    """Nodes without a usable address on the pinned interface."""
    return [node for node, own in addresses.items() if not any(c.interface == pinned for c in own.candidates)]


def probe_targets(node: int, nodes: int) -> list[int]:
    """The nodes that a node connects to: all of up to ALL_PAIRS nodes; with more, nodes at strides of powers of two.

    In addition, all connect to node 0. If A connects to B, B connects to A, so each connection is tried in both
    directions; only node 0, which all connect to later because it hosts the store, does not connect back to all of
    them. Each node makes at most 2 log2(nodes) + 1 connections.
    """
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != node]
    strides = [1 << power for power in range((nodes - 1).bit_length()) if 1 << power <= nodes // 2]
    near = {(node + step) % nodes for step in strides} | {(node - step) % nodes for step in strides}
    return sorted((near | {0}) - {node})


def networks_to_rate(probed: Sequence[Network]) -> list[int]:
    """The indices of the networks whose rate has to be measured, since nothing else distinguishes them."""
    proved = [index for index, network in enumerate(probed) if network.proved]
    speeds = [speed for index in proved if (speed := probed[index].speed_mbps) is not None]
    # An unknown speed may be the best one.
    best = [index for index in proved if probed[index].speed_mbps in (None, max(speeds, default=None))]
    # Networks of both families over the same interfaces have the same rate: reversed, so that the first one is kept.
    by_interfaces = {tuple(sorted(probed[index].interfaces.items())): index for index in reversed(best)}
    return sorted(by_interfaces.values()) if len(by_interfaces) > 1 else []


def elect(probed: Sequence[Network]) -> int | None:
    """The index of the best network: proved, then pinned, then fast, then by a stable name. None if none is proved.

    The speed is what the kernel says; if that is equal or unknown, the measured rate decides, then the MTU. IPv4
    comes before IPv6.
    """
    proved = [index for index, network in enumerate(probed) if network.proved]
    return min(proved, key=lambda index: _merit(probed[index], probed), default=None)


def why_elected(elected: str, networks: Sequence[Mapping[str, Any]]) -> str:
    """What the elected network has and the others have not, as a phrase, by the rules of the election.

    Args:
        elected: Its name.
        networks: All networks that were probed, as journaled.
    """
    own = next((each for each in networks if each.get("name") == elected), None)
    others = [each for each in networks if each is not own and each.get("proved")]
    if own is None or not others:
        return "the only one that connects all nodes" if own is not None and len(networks) > 1 else ""
    fastest = max(each.get("speed_mbps") or 0 for each in (own, *others))
    rate = max(each.get("measured_mb_per_s") or 0.0 for each in (own, *others))

    def equal(name: str, unknown: float) -> Callable[[Mapping[str, Any]], bool]:
        return lambda each: (each.get(name) or unknown) >= (own.get(name) or unknown)

    rules: Sequence[tuple[Callable[[Mapping[str, Any]], bool], str]] = (
        (equal("pinned", False), "the spec names its interface"),
        (equal("speed_mbps", fastest), "the one with the fastest links"),
        (lambda each: (each.get("measured_mb_per_s") or rate) * _EQUAL_RATE >= rate, "the fastest as measured"),
        (equal("mtu", 0), "as fast as the next, with larger packets"),
    )
    for is_equal, phrase in rules:
        others = [each for each in others if is_equal(each)]
        if not others:
            return phrase
    return "as good as the next; chosen by address family and name"


def better_unproved_networks(probed: Sequence[Network], elected: int) -> list[Network]:
    """Networks that would have been faster than the elected one, or are pinned, had they been proved."""
    chosen = probed[elected]

    def is_better(network: Network) -> bool:
        speed, chosen_speed = network.speed_mbps, chosen.speed_mbps
        faster = speed is not None and chosen_speed is not None and speed > chosen_speed
        same_interfaces = network.interfaces == chosen.interfaces
        as_fast = speed == chosen_speed or speed is None or chosen_speed is None
        return not same_interfaces and (faster or network.pinned or (as_fast and network.mtu > chosen.mtu))

    return [candidate for candidate in probed if not candidate.proved and is_better(candidate)]


def culprits(problems: Iterable[NetworkProblem], nodes: int) -> list[int]:
    """The smallest set of nodes without which no problem is left, if it is certainly the only one; otherwise none.

    Problems are edges of a graph, and the culprits its smallest vertex cover. It is certain if each of them, once those
    before it are removed, has problems with more others than there are culprits left: blaming those others instead
    would take more nodes. A single pair that cannot connect does not show which of the two is at fault; nor do two
    nodes, or culprits that are not a minority of the ``nodes``.
    """
    edges = {frozenset((problem.source, problem.target)) for problem in problems}
    blamed: list[int] = []
    degrees: list[int] = []
    while edges:
        [(worst, count)] = Counter(node for edge in edges for node in edge).most_common(1)
        # No node accounts for more edges than that one, so at least edges / count nodes are needed: too many for
        # the condition below, and the greedy search would take long for nothing.
        if count <= len(edges) / count:
            return []
        blamed.append(worst)
        degrees.append(count)
        edges = {edge for edge in edges if worst not in edge}
    certain = all(count > len(blamed) - index for index, count in enumerate(degrees))
    return sorted(blamed) if certain and len(blamed) * 2 < nodes else []


def _guesses(
    addresses: Mapping[int, NodeAddresses], usable: Mapping[int, Sequence[Candidate]]
) -> Iterator[tuple[str, dict[int, Candidate]]]:
    """Names and members of possible networks: by subnet, by interface, by speed, by the route to node 0."""
    for family in (4, 6):
        of_family = {node: [c for c in candidates if c.family == family] for node, candidates in usable.items()}
        # Every network has node 0 as a member: what only other nodes have cannot connect all nodes.
        of_node_0 = of_family.get(0, [])
        for subnet in dict.fromkeys(candidate.subnet for candidate in of_node_0):
            yield subnet, _fastest_of_each(of_family, lambda candidate, subnet=subnet: candidate.subnet == subnet)
        for name in dict.fromkeys(candidate.interface for candidate in of_node_0):
            yield (
                f"interface {name}",
                _fastest_of_each(of_family, lambda candidate, name=name: candidate.interface == name),
            )
        yield f"the fastest of each node (IPv{family})", _fastest_of_each(of_family, lambda _: True)
    yield "the route to node 0", _members_by_route(addresses, usable)


def _address_key(members: Mapping[int, Candidate]) -> tuple[str, ...]:
    """The addresses of all members by node: the same for the same network, however it was guessed."""
    return tuple(members[node].address for node in sorted(members))


def _fastest_of_each(candidates: Mapping[int, Sequence[Candidate]], matches: Any) -> dict[int, Candidate]:
    """The fastest of each node's matching candidates; nodes without one are left out."""
    fastest = {}
    for node, of_node in candidates.items():
        matching = [candidate for candidate in of_node if matches(candidate)]
        if matching:
            fastest[node] = min(matching, key=lambda c: (-(c.speed_mbps or 0), -c.mtu, natural_sort_key(c.interface)))
    return fastest


def _members_by_route(
    addresses: Mapping[int, NodeAddresses], usable: Mapping[int, Sequence[Candidate]]
) -> dict[int, Candidate]:
    """The addresses over which the nodes have connected to node 0; for node 0, the one that most nodes use."""
    used = Counter(own.coordinator_address for own in addresses.values() if own.coordinator_address is not None)
    routes = {node: own.own_address for node, own in addresses.items()}
    routes[0] = used.most_common(1)[0][0] if used else None
    return {
        node: candidate
        for node, candidates in usable.items()
        for candidate in candidates
        if candidate.address == routes[node]
    }


def _merit(network: Network, probed: Sequence[Network]) -> tuple[Any, ...]:
    """A key that sorts the best network first, among all that were probed.

    All nodes must arrive at the same choice at each attempt: the names at the end break ties.
    """
    best_rate = max((other.rate or 0.0 for other in probed if other.proved), default=0.0)
    # A network of the other family over the same interfaces has the same rate.
    alike = (other.rate for other in probed if other.interfaces == network.interfaces)
    rate = network.rate if network.rate is not None else next((each for each in alike if each is not None), None)
    fast = rate is None or rate * _EQUAL_RATE >= best_rate
    # An unknown speed counts as the best one, so that the measured rate decides.
    speeds = [other.speed_mbps or 0 for other in probed if other.proved]
    speed = network.speed_mbps if network.speed_mbps is not None else max(speeds, default=0)
    names = sorted(natural_sort_key(name) for name in set(network.interfaces.values()))
    return (not network.pinned, -speed, not fast, -network.mtu, network.family, names, network.name)
