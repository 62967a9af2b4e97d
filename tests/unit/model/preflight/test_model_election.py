"""Which network is trained over: what nodes may have in common, who is at fault, and what is best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from helpers.candidate_networks import addresses, card, make_network
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.hostlist import natural_sort_key
from slurmtrain.model.preflight.election import (
    ALL_PAIRS,
    Candidate,
    NetworkProblem,
    NodeAddresses,
    ProbedNetwork,
    better_unproved_networks,
    candidate_networks,
    culprits,
    elect,
    networks_to_rate,
    probe_targets,
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


def test_a_node_that_no_other_reaches_is_at_fault() -> None:
    assert culprits([], 4) == []
    assert culprits(cut_off([2], 4), 4) == [2]
    assert culprits(problems((0, 2), (1, 2), (3, 2)), 4) == [2]
    assert culprits(problems((2, 0), (2, 1), (2, 3)), 4) == [2]
    assert culprits(problems((0, 2), (2, 1)), 8) == [2]


def test_no_node_of_separate_pairs_is_at_fault() -> None:
    for nodes in (2, 3, 4, 64):
        assert culprits(problems((0, 1), (1, 0)), nodes) == []
    path = [(0, 1), (1, 2), (2, 3)]
    for pairs in ([(0, 1), (2, 3)], path, [*path, (3, 0)], [(0, 1), (1, 2), (2, 0)]):
        assert culprits(problems(*pairs), 8) == []
    # Three that miss three others, but for one pair: either three will do.
    assert culprits(problems(*((a, b) for a in range(3) for b in range(3, 6) if (a, b) != (2, 5))), 7) == []


def test_half_of_all_nodes_are_never_at_fault() -> None:
    assert culprits(cut_off([0, 1], 4), 4) == []
    assert culprits(cut_off([0, 1, 2], 4), 4) == []
    assert culprits(cut_off([0, 1], 5), 5) == [0, 1]
    halves = problems(*((a, b) for a in range(4) for b in range(4, 8)))
    assert culprits(halves, 8) == []


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


@given(st.permutations([(0, 3), (1, 3), (2, 3), (4, 3), (4, 5), (5, 0), (5, 1), (2, 5)]))
def test_the_order_of_problems_does_not_matter(pairs: list[tuple[int, int]]) -> None:
    assert culprits(problems(*pairs), 6) == [3, 5]


# --- which one is best ------------------------------------------------------------------------------------------


LOST = problems((0, 1))
# Each is better than the next one by one criterion, and no better by any later one.
RANKED = [
    ProbedNetwork(make_network("z", "eth9", speed=10, mtu=500, family=6, pinned=True), rate=1e6),
    ProbedNetwork(make_network("y", "eth8", speed=1000, mtu=600, family=6), rate=1e8),
    ProbedNetwork(make_network("x", "eth7", speed=100, mtu=700, family=6), rate=9e8),
    ProbedNetwork(make_network("w", "eth6", speed=100, mtu=900, family=6), rate=1e8),
    ProbedNetwork(make_network("v", "eth10", speed=100, mtu=800, family=4), rate=1e8),
    ProbedNetwork(make_network("u", "eth2", speed=100, mtu=800, family=6), rate=1e8),
    ProbedNetwork(make_network("t", "eth4", speed=100, mtu=800, family=6), rate=1e8),
]


def test_a_network_that_is_not_proved_is_never_elected() -> None:
    assert elect([]) is None
    assert elect([ProbedNetwork(make_network(), LOST), ProbedNetwork(make_network(pinned=True), LOST)]) is None
    assert elect([ProbedNetwork(make_network(pinned=True), LOST), ProbedNetwork(make_network(speed=1))]) == 1


def probed(rate: float | None = None, name: str = "n", **options: Any) -> ProbedNetwork:
    return ProbedNetwork(make_network(name, **options), rate=rate)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(probed(speed=10, pinned=True), probed(speed=400_000), id="pinned-before-speed"),
        pytest.param(probed(1.0, speed=200), probed(1e9, speed=100), id="speed-before-rate"),
        pytest.param(probed(3e8, mtu=1500), probed(1e8, mtu=9000), id="rate-before-mtu"),
        pytest.param(probed(1e8, mtu=9000), probed(1.9e8, mtu=1500), id="mtu-before-rate"),
        pytest.param(probed(9e8, speed=None), probed(1e8, speed=None), id="rate-alone"),
        pytest.param(probed(mtu=9000, family=6), probed(mtu=1500, family=4), id="mtu-before-family"),
        pytest.param(probed(interface="eth9", family=4), probed(interface="eth1", family=6), id="family-before-name"),
        pytest.param(probed(interface="eth2"), probed(interface="eth10"), id="natural-names"),
        pytest.param(probed(name="a"), probed(name="b"), id="name-of-the-network"),
    ],
)
def test_the_better_one_is_elected_in_either_order(better: ProbedNetwork, worse: ProbedNetwork) -> None:
    assert elect([better, worse]) == 0
    assert elect([worse, better]) == 1


@pytest.mark.parametrize("among", range(1, 8))
def test_a_criterion_counts_only_where_those_before_it_are_equal(among: int) -> None:
    for names in itertools.combinations(RANKED, among):
        assert elect(names) == 0


def test_an_unknown_speed_may_be_the_best_and_a_rate_over_one_family_counts_for_the_other() -> None:
    partly_unknown, unknown = {"speed": None, "mtu": 9000}, {"speed": 100_000}
    assert elect([probed(**unknown), probed(**partly_unknown)]) == 1
    assert elect([probed(9e8, **unknown), probed(1e8, **partly_unknown)]) == 0
    assert elect([probed(**unknown), probed(speed=10, mtu=9000)]) == 0
    four, six = ({"family": family, "mtu": 1500, "interface": "eth1"} for family in (4, 6))
    assert elect([probed(1e8, mtu=9000, interface="eth2"), probed(**four), probed(9e8, **six)]) == 1


@given(st.permutations(RANKED), st.sets(st.sampled_from(RANKED[:3]).map(RANKED.index)))
def test_the_order_in_which_networks_stand_changes_nothing(order: list[ProbedNetwork], lost: set[int]) -> None:
    broken = [RANKED[index] for index in lost]
    probed = [replace(network, problems=LOST) if network in broken else network for network in order]
    elected = elect(probed)
    assert elected is not None
    expected = elect([replace(network, problems=LOST) if network in broken else network for network in RANKED])
    assert expected is not None
    assert probed[elected] == RANKED[expected]


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


def test_a_better_network_that_was_not_proved_is_found() -> None:
    elected_interface = ProbedNetwork(make_network(interface="eth0", speed=1000))
    faster = ProbedNetwork(make_network("faster", "ib0", speed=100_000), LOST)
    slower = ProbedNetwork(make_network("slower", "eth1", speed=100), LOST)
    wider = ProbedNetwork(make_network("wider", "eth2", speed=1000, mtu=9000), LOST)
    rated = ProbedNetwork(make_network("asked", "eth3", speed=10, pinned=True), LOST)
    other_family = ProbedNetwork(make_network("other", "eth0", mtu=9000, family=6), LOST)
    partly_unknown = ProbedNetwork(make_network("unsaid", "eth4", speed=None), LOST)
    networks = better_unproved_networks(
        [elected_interface, faster, slower, wider, rated, other_family, partly_unknown], 0
    )
    assert [network.network.name for network in networks] == ["faster", "wider", "asked"]
    assert better_unproved_networks([elected_interface, replace(faster, problems=())], 0) == []


# --- names ------------------------------------------------------------------------------------------------------


def test_names_sort_by_the_numbers_in_them() -> None:
    names = ["eth10", "eth2", "ib0", "enp10s0", "enp2s0", "10ge0", "eth"]
    assert sorted(names, key=natural_sort_key) == ["enp2s0", "enp10s0", "eth", "eth2", "eth10", "ib0", "10ge0"]


@given(st.lists(st.text(max_size=8)))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    ordered = sorted(names, key=natural_sort_key)
    assert sorted(ordered) == sorted(names)
    assert all(natural_sort_key(first) <= natural_sort_key(second) for first, second in itertools.pairwise(ordered))


# --- all together -----------------------------------------------------------------------------------------------


@st.composite
def _clusters(draw: st.DrawFn) -> dict[int, NodeAddresses]:
    nodes = draw(st.integers(1, 5))
    rails = draw(st.integers(1, 6))
    cards: Mapping[int, list[Candidate]] = {
        node: [
            card(
                draw(st.sampled_from(["eth", "ib"])) + str(rail),
                draw(st.sampled_from([f"10.{rail}.0.{node + 1}", f"10.{rail}.0.1", f"fd00::{rail}:{node}"])),
                speed=draw(st.sampled_from([None, 10, 1000])),
            )
            for rail in range(rails)
            if draw(st.booleans())
        ]
        for node in range(nodes)
    }
    vias = st.sampled_from([None, *[network.address for names in cards.values() for network in names]])
    return {node: NodeAddresses(names, draw(vias), draw(vias)) for node, names in cards.items()}


@given(_clusters(), st.sampled_from([None, "eth0", "ib1"]))
def test_every_network_has_one_unshared_address_of_one_family_for_each_node(
    node_addresses: dict[int, NodeAddresses], pinned: str | None
) -> None:
    networks, excluded = candidate_networks(node_addresses, pinned)
    left_out = {(network.node, network.address) for network in excluded}
    for network in networks:
        assert list(network.members) == sorted(node_addresses)
        assert all(member in node_addresses[node].candidates for node, member in network.members.items())
        assert len(set(addresses(network))) == len(node_addresses)
        assert not {(node, member.address) for node, member in network.members.items()} & left_out
        assert network.pinned == (set(network.interfaces.values()) == {pinned})
    assert len({tuple(addresses(network)) for network in networks}) == len(networks) <= 5
