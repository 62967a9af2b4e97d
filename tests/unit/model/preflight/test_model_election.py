"""Which network is trained over: what nodes may have in common, who is at fault, and what is best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers.candidate_networks import addresses, card, make_network
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.preflight.election import (
    ALL_PAIRS,
    Candidate,
    Network,
    NetworkProblem,
    NodeAddresses,
    better_unproved_networks,
    candidate_networks,
    culprits,
    elect,
    networks_to_rate,
    nodes_without_interface,
    probe_targets,
    why_elected,
)

# --- who tries whom ---------------------------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_each_way_is_tried_in_both_directions_and_all_nodes_are_connected(nodes: int) -> None:
    targets = {node: probe_targets(node, nodes) for node in range(nodes)}
    for node, others in targets.items():
        assert others == sorted(set(others) - {node})
        assert all(0 <= other < nodes for other in others)
        assert all(node in targets[other] for other in others if other != 0)
        assert node == 0 or 0 in others
        assert nodes == 1 or (node + 1) % nodes in others
    if nodes <= ALL_PAIRS:
        assert all(len(others) == nodes - 1 for others in targets.values())
    else:
        assert all(len(others) <= 2 * math.log2(nodes) + 1 for others in targets.values())
    connected, frontier = {0}, {0}
    while frontier:
        frontier = {other for node in frontier for other in targets[node]} - connected
        connected |= frontier
    assert len(connected) == nodes


# --- who is at fault --------------------------------------------------------------------------------------------


def problems(*pairs: tuple[int, int]) -> list[NetworkProblem]:
    return [NetworkProblem(source=source, target=target, reason="lost") for source, target in pairs]


def cut_off(unreachable: Iterable[int], nodes: int) -> list[NetworkProblem]:
    """All that goes wrong where nobody reaches these nodes, and they reach nobody."""
    unreachable = set(unreachable)
    return problems(
        *(
            (node, other)
            for node in range(nodes)
            for other in probe_targets(node, nodes)
            if node in unreachable or other in unreachable
        )
    )


@given(st.integers(3, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=3))))
def test_only_nodes_that_reach_no_other_are_at_fault(case: tuple[int, set[int]]) -> None:
    nodes, unreachable = case
    expected = sorted(unreachable) if 2 * len(unreachable) < nodes else []
    assert culprits(cut_off(unreachable, nodes), nodes) == expected


def _smallest_covers(edges: set[frozenset[int]], nodes: int) -> list[set[int]]:
    """All smallest sets of nodes that have a part in every one of these pairs."""
    for size in range(nodes + 1):
        networks = [
            set(names) for names in itertools.combinations(range(nodes), size) if all(e & set(names) for e in edges)
        ]
        if networks:
            return networks
    return []


@given(st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.sampled_from(list(
    itertools.permutations(range(n), 2)
))))))  # fmt: skip
def test_without_those_at_fault_no_problem_is_left_and_no_others_would_do(
    case: tuple[int, set[tuple[int, int]]],
) -> None:
    nodes, pairs = case
    blamed = culprits(problems(*sorted(pairs)), nodes)
    if blamed:
        assert _smallest_covers({frozenset(pair) for pair in pairs}, nodes) == [set(blamed)]
        assert 2 * len(blamed) < nodes


# --- which one is best ------------------------------------------------------------------------------------------


LOST = problems((0, 1))


def test_a_network_that_is_not_proved_is_never_elected() -> None:
    assert elect([]) is None
    assert elect([replace(make_network(), problems=LOST), replace(make_network(pinned=True), problems=LOST)]) is None
    assert elect([replace(make_network(pinned=True), problems=LOST), make_network(speed=1)]) == 1


def probed(rate: float | None = None, name: str = "n", **options: Any) -> Network:
    return replace(make_network(name, **options), rate=rate)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(probed(1e8, mtu=9000), probed(1.9e8, mtu=1500), id="mtu-before-rate"),
        pytest.param(probed(9e8, speed=None), probed(1e8, speed=None), id="rate-alone"),
    ],
)
def test_the_better_one_is_elected_in_either_order(better: Network, worse: Network) -> None:
    assert elect([better, worse]) == 0
    assert elect([worse, better]) == 1


def test_an_unknown_speed_may_be_the_best_and_a_rate_over_one_family_counts_for_the_other() -> None:
    partly_unknown, unknown = {"speed": None, "mtu": 9000}, {"speed": 100_000}
    assert elect([probed(**unknown), probed(**partly_unknown)]) == 1
    assert elect([probed(9e8, **unknown), probed(1e8, **partly_unknown)]) == 0
    assert elect([probed(**unknown), probed(speed=10, mtu=9000)]) == 0
    four, six = ({"family": family, "mtu": 1500, "interface": "eth1"} for family in (4, 6))
    assert elect([probed(1e8, mtu=9000, interface="eth2"), probed(**four), probed(9e8, **six)]) == 1


def test_rates_are_measured_if_speeds_do_not_decide() -> None:
    fast, fast_too = probed(interface="ib0", speed=100), probed(interface="ib1", speed=100)
    slow, partly_unknown = probed(speed=10), probed(interface="eth7", speed=None)
    lost, lost_too = replace(fast, problems=LOST), replace(fast_too, problems=LOST)
    four, six, other = probed(family=4), probed(family=6), probed(interface="eth1")
    for networks, to_rate in (
        ([slow, fast, fast_too], [1, 2]),
        ([fast, slow], []),
        ([fast, partly_unknown, slow], [0, 1]),
        ([partly_unknown], []),
        ([], []),
        # Not of networks that were not proved, and once where the same interfaces have two families.
        ([fast, lost_too], []),
        ([lost, lost_too], []),
        ([four, six], []),
        ([four, six, other], [0, 2]),
    ):
        assert networks_to_rate(networks) == to_rate


JOURNALED: dict[str, Any] = {
    "name": "fast",
    "proved": True,
    "speed_mbps": 10_000,
    "measured_mb_per_s": 100.0,
    "mtu": 9000,
}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"speed_mbps": 1000}, "the one with the fastest links"),
        ({"measured_mb_per_s": 20.0}, "the fastest as measured"),
        ({"measured_mb_per_s": 80.0, "mtu": 1500}, "as fast as the next, with larger packets"),
        ({}, "as good as the next; chosen by address family and name"),
        ({"proved": False, "speed_mbps": 100_000}, "the only one that connects all nodes"),
        ({"speed_mbps": None, "measured_mb_per_s": None, "mtu": 1500}, "as fast as the next, with larger packets"),
    ],
)
def test_why_a_network_was_elected_is_the_first_rule_by_which_it_is_better(other: dict[str, Any], why: str) -> None:
    networks = [{**JOURNALED, "name": "other", **other}, JOURNALED]
    assert why_elected("fast", networks) == why
    assert why_elected("fast", [networks[0], {**JOURNALED, "pinned": True}]) in (why, "the spec names its interface")
    assert why_elected("fast", [JOURNALED]) == why_elected("none", networks) == ""


def test_a_better_network_that_was_not_proved_is_found() -> None:
    elected_interface = make_network(interface="eth0", speed=1000)
    faster = replace(make_network("faster", "ib0", speed=100_000), problems=LOST)
    slower = replace(make_network("slower", "eth1", speed=100), problems=LOST)
    wider = replace(make_network("wider", "eth2", speed=1000, mtu=9000), problems=LOST)
    rated = replace(make_network("asked", "eth3", speed=10, pinned=True), problems=LOST)
    other_family = replace(make_network("other", "eth0", mtu=9000, family=6), problems=LOST)
    partly_unknown = replace(make_network("unsaid", "eth4", speed=None), problems=LOST)
    networks = better_unproved_networks(
        [elected_interface, faster, slower, wider, rated, other_family, partly_unknown], 0
    )
    assert [network.name for network in networks] == ["faster", "wider", "asked"]
    assert better_unproved_networks([elected_interface, replace(faster, problems=())], 0) == []


# --- which networks a run of several nodes could use --------------------------------------------------------------


def make_addresses(*nodes: Sequence[Candidate]) -> dict[int, NodeAddresses]:
    return {node: NodeAddresses(list(candidates)) for node, candidates in enumerate(nodes)}


def network_names(networks: Iterable[Network]) -> list[str]:
    return [network.name for network in networks]


# --- which networks there may be --------------------------------------------------------------------------------


FAST = 200_000


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        # Addresses in one subnet are a network, whatever their interfaces are called.
        ([[card("hsn0", "10.1.0.1")], [card("ib0", "10.1.0.2")], [card("enp1s0f0", "10.1.0.3")]],
         {"10.1.0.0/24": "10.1.0.1 10.1.0.2 10.1.0.3"}),
        # A subnet for each node, and host routes, are one by the name of the interface.
        ([[card("eth0", "10.0.1.5")], [card("eth0", "10.0.2.5")], [card("eth0", "10.0.3.5")]],
         {"interface eth0": "10.0.1.5 10.0.2.5 10.0.3.5"}),
        ([[card("ens5", "10.0.0.1", 32)], [card("ens5", "10.0.0.2", 32)]], {"interface ens5": "10.0.0.1 10.0.0.2"}),
        # Where neither is shared, the fastest of each node is tried.
        ([[card("hsn0", "10.0.1.5", speed=FAST), card("eno1", "192.168.1.5")],
          [card("ib3", "10.0.2.5", speed=FAST), card("enp0", "192.168.2.5")]],
         {"the fastest of each node (IPv4)": "10.0.1.5 10.0.2.5"}),
        # Two interfaces in one subnet are told apart by name. One node may have an address twice.
        ([[card("eth0", f"10.0.0.{node}"), card("eth1", f"10.0.0.{node + 100}")] for node in (1, 2)],
         {"10.0.0.0/24": "10.0.0.1 10.0.0.2", "interface eth1": "10.0.0.101 10.0.0.102"}),
        ([[card("eth0", "10.0.0.1"), card("eth0", "10.0.0.1")], [card("eth0", "10.0.0.2")]],
         {"10.0.0.0/24": "10.0.0.1 10.0.0.2"}),
        # A network has one family, and IPv4 comes first.
        ([[card("eth0", "fd00::1", 64)], [card("ens0", "fd00::2", 64)]], {"fd00::/64": "fd00::1 fd00::2"}),
        ([[card("eth0", f"fd00::{node}", 64), card("eth0", f"10.0.0.{node}")] for node in (1, 2)],
         {"10.0.0.0/24": "10.0.0.1 10.0.0.2", "fd00::/64": "fd00::1 fd00::2"}),
        ([[card("eth0", "10.0.0.1")], [card("eth0", "fd00::2", 64)]], {}),
        # One that a node lacks is none.
        ([[card("eth0", "10.0.0.1"), card("ib0", "10.1.0.1", speed=FAST)],
          [card("eth0", "10.0.0.2"), card("ib0", "10.1.0.2", speed=FAST)], [card("eth0", "10.0.0.3")]],
         {"10.0.0.0/24": "10.0.0.1 10.0.0.2 10.0.0.3",
          "the fastest of each node (IPv4)": "10.1.0.1 10.1.0.2 10.0.0.3"}),
        ([[card("eth0", "10.0.0.1")], []], {}),
    ],
)  # fmt: skip
def test_which_networks_nodes_may_have_in_common(nodes: list[list[Candidate]], expected: dict[str, str]) -> None:
    networks, excluded = candidate_networks(make_addresses(*nodes), None)
    assert {network.name: " ".join(addresses(network)) for network in networks} == expected
    assert [network.name for network in networks] == [*expected]
    assert [network.family for network in networks] == [6 if ":" in each else 4 for each in expected.values()]
    assert excluded == []


def test_the_route_by_which_nodes_came_is_tried() -> None:
    node_addresses = make_addresses(
        [card("hsn0", "10.0.1.5", speed=200_000), card("eno1", "192.168.1.5")],
        [card("ib3", "10.0.2.5", speed=200_000), card("enp0", "192.168.2.5")],
        [card("ib3", "10.0.3.5", speed=200_000), card("enp0", "192.168.3.5")],
    )
    for node in (1, 2):
        node_addresses[node] = replace(
            node_addresses[node], own_address=f"192.168.{node + 1}.5", coordinator_address="192.168.1.5"
        )
    networks, _ = candidate_networks(node_addresses, None)
    assert network_names(networks) == ["the fastest of each node (IPv4)", "the route to node 0"]
    assert addresses(networks[1]) == ["192.168.1.5", "192.168.2.5", "192.168.3.5"]
    # One that is a subnet as well is one network; over addresses that are no candidates it is none.
    for own, coordinator in (("10.0.0.2", "10.0.0.1"), ("127.0.0.1", "127.0.0.1")):
        node_addresses = make_addresses([card("eth0", "10.0.0.1")], [card("eth0", "10.0.0.2")])
        node_addresses[1] = replace(node_addresses[1], own_address=own, coordinator_address=coordinator)
        assert network_names(candidate_networks(node_addresses, None)[0]) == ["10.0.0.0/24"]


RAILS = [
    [card(f"eth{rail}", f"10.{rail}.0.{node + 1}", speed=400_000) for rail in range(8)]
    + [card("mgmt0", f"192.168.0.{node + 1}")]
    for node in range(3)
]


def test_of_many_rails_a_few_are_tried_and_always_the_route_that_is_known_to_work() -> None:
    few = ["10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24"]
    assert network_names(candidate_networks(make_addresses(*RAILS), None)[0]) == few
    node_addresses = {
        node: replace(
            place,
            own_address=f"192.168.0.{node + 1}" if node else None,
            coordinator_address="192.168.0.1" if node else None,
        )
        for node, place in make_addresses(*RAILS).items()
    }
    assert network_names(candidate_networks(node_addresses, None)[0]) == [*few, "192.168.0.0/24"]


def test_an_address_that_several_nodes_have_is_left_out_with_the_reason() -> None:
    decoy = card("br0", "172.18.0.1", 16, speed=100_000)
    networks, excluded = candidate_networks(
        make_addresses(*([decoy, card("eth0", f"10.0.0.{node + 1}")] for node in range(3))), None
    )
    assert network_names(networks) == ["10.0.0.0/24"]
    assert [(network.node, network.interface, network.address, network.reason) for network in excluded] == [
        (node, "br0", "172.18.0.1", "3 nodes have this address") for node in range(3)
    ]


def test_of_two_interfaces_in_one_subnet_the_faster_one_counts_then_that_with_the_larger_mtu_then_the_first() -> None:
    def elected_interface(*of_node_1: Candidate) -> str:
        networks, _ = candidate_networks(make_addresses([card("ib0", "10.0.0.1")], of_node_1), None)
        return networks[0].interfaces[1]

    assert elected_interface(card("eth2", "10.0.0.2"), card("eth3", "10.0.0.3", speed=10_000)) == "eth3"
    assert elected_interface(card("eth2", "10.0.0.2"), card("eth3", "10.0.0.3", mtu=9000)) == "eth3"
    assert elected_interface(card("eth10", "10.0.0.2"), card("eth2", "10.0.0.3")) == "eth2"
    assert elected_interface(card("eth2", "10.0.0.2", speed=None), card("eth3", "10.0.0.3")) == "eth3"


def test_what_all_nodes_have_on_the_pinned_interface_is_pinned_and_comes_first() -> None:
    node_addresses = make_addresses(
        *([card("eth0", f"10.0.0.{node}"), card("ib0", f"10.1.0.{node}", speed=400_000)] for node in (1, 2))
    )
    networks, _ = candidate_networks(node_addresses, "eth0")
    assert [(network.name, network.pinned) for network in networks] == [("10.0.0.0/24", True), ("10.1.0.0/24", False)]
    assert [network.pinned for network in candidate_networks(node_addresses, None)[0]] == [False, False]


def test_a_network_in_which_one_node_has_another_interface_is_not_pinned() -> None:
    node_addresses = make_addresses([card("eth0", "10.0.0.1")], [card("eth1", "10.0.0.2")])
    assert [(network.name, network.pinned) for network in candidate_networks(node_addresses, "eth0")[0]] == [
        ("10.0.0.0/24", False)
    ]
    assert nodes_without_interface(node_addresses, "eth0") == [1]
    assert nodes_without_interface(node_addresses, "eth7") == [0, 1]
    assert nodes_without_interface(make_addresses([card("eth0", "10.0.0.1")]), "eth0") == []
