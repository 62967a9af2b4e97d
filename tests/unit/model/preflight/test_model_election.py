"""Which network is trained over: what nodes may have in common, who is at fault, and what is best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.preflight.election import (
    ALL_PAIRS,
    Candidate,
    Network,
    NetworkProblem,
    NodeAddresses,
    ProbedNetwork,
    better_unproved_networks,
    candidate_networks,
    culprits,
    elect,
    natural_sort_key,
    networks_to_rate,
    nodes_without_interface,
    probe_targets,
)

GIGABIT = 1000


def card(interface: str, address: str, prefix: int = 24, speed: int | None = GIGABIT, mtu: int = 1500) -> Candidate:
    kind = "infiniband" if interface.startswith("ib") else "ethernet"
    return Candidate(interface=interface, address=address, prefix=prefix, speed_mbps=speed, mtu=mtu, kind=kind)


def make_addresses(*nodes: Sequence[Candidate]) -> dict[int, NodeAddresses]:
    return {node: NodeAddresses(list(candidates)) for node, candidates in enumerate(nodes)}


def network_names(networks: Iterable[Network]) -> list[str]:
    return [network.name for network in networks]


def addresses(make_network: Network) -> list[str]:
    return [member.address for member in make_network.members.values()]


# --- which networks there may be --------------------------------------------------------------------------------


def test_addresses_in_one_subnet_are_a_network_whatever_their_interfaces_are_called() -> None:
    networks, excluded = candidate_networks(
        make_addresses([card("hsn0", "10.1.0.1")], [card("ib0", "10.1.0.2")], [card("enp1s0f0", "10.1.0.3")]), None
    )
    assert [(network.name, dict(network.interfaces)) for network in networks] == [
        ("10.1.0.0/24", {0: "hsn0", 1: "ib0", 2: "enp1s0f0"})
    ]
    assert networks[0].kind == "mixed"
    assert excluded == []


def test_a_subnet_for_each_node_is_a_network_by_the_name_of_the_interface() -> None:
    networks, _ = candidate_networks(
        make_addresses([card("eth0", "10.0.1.5")], [card("eth0", "10.0.2.5")], [card("eth0", "10.0.3.5")]), None
    )
    assert [(network.name, addresses(network)) for network in networks] == [
        ("interface eth0", ["10.0.1.5", "10.0.2.5", "10.0.3.5"])
    ]


def test_host_routes_are_a_network_by_the_name_of_the_interface() -> None:
    networks, _ = candidate_networks(
        make_addresses([card("ens5", "10.0.0.1", 32)], [card("ens5", "10.0.0.2", 32)]), None
    )
    assert network_names(networks) == ["interface ens5"]


def test_where_neither_subnet_nor_name_is_shared_the_fastest_of_each_node_is_tried() -> None:
    networks, _ = candidate_networks(
        make_addresses(
            [card("hsn0", "10.0.1.5", speed=200_000), card("eno1", "192.168.1.5")],
            [card("ib3", "10.0.2.5", speed=200_000), card("enp0", "192.168.2.5")],
        ),
        None,
    )
    assert [(network.name, addresses(network)) for network in networks] == [
        ("the fastest of each node (IPv4)", ["10.0.1.5", "10.0.2.5"])
    ]


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


def test_a_route_that_is_a_subnet_as_well_is_one_network() -> None:
    node_addresses = make_addresses([card("eth0", "10.0.0.1")], [card("eth0", "10.0.0.2")])
    node_addresses[1] = replace(node_addresses[1], own_address="10.0.0.2", coordinator_address="10.0.0.1")
    assert network_names(candidate_networks(node_addresses, None)[0]) == ["10.0.0.0/24"]


def test_a_route_over_addresses_that_are_no_candidates_is_none() -> None:
    node_addresses = make_addresses([card("eth0", "10.0.0.1")], [card("eth0", "10.0.0.2")])
    node_addresses[1] = replace(node_addresses[1], own_address="127.0.0.1", coordinator_address="127.0.0.1")
    assert network_names(candidate_networks(node_addresses, None)[0]) == ["10.0.0.0/24"]


RAILS = [
    [card(f"eth{rail}", f"10.{rail}.0.{node + 1}", speed=400_000) for rail in range(8)]
    + [card("mgmt0", f"192.168.0.{node + 1}")]
    for node in range(3)
]


def test_of_many_rails_a_few_are_tried() -> None:
    networks, _ = candidate_networks(make_addresses(*RAILS), None)
    assert network_names(networks) == ["10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24"]


def test_the_route_that_is_known_to_work_is_always_probed() -> None:
    node_addresses = {
        node: replace(
            place,
            own_address=f"192.168.0.{node + 1}" if node else None,
            coordinator_address="192.168.0.1" if node else None,
        )
        for node, place in make_addresses(*RAILS).items()
    }
    networks, _ = candidate_networks(node_addresses, None)
    assert network_names(networks) == ["10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24", "192.168.0.0/24"]


def test_an_address_that_several_nodes_have_is_left_out_with_the_reason() -> None:
    decoy = card("br0", "172.18.0.1", 16, speed=100_000)
    networks, excluded = candidate_networks(
        make_addresses(*([decoy, card("eth0", f"10.0.0.{node + 1}")] for node in range(3))), None
    )
    assert network_names(networks) == ["10.0.0.0/24"]
    assert [(network.node, network.interface, network.address, network.reason) for network in excluded] == [
        (node, "br0", "172.18.0.1", "3 nodes have this address") for node in range(3)
    ]


def test_an_address_that_two_of_many_nodes_have_is_left_out_on_these() -> None:
    node_addresses = make_addresses(
        [card("eth0", "10.0.0.1"), card("eth1", "10.1.0.1", speed=10)],
        [card("eth0", "10.0.0.2"), card("eth1", "10.1.0.2", speed=10)],
        [card("eth0", "10.0.0.2"), card("eth1", "10.1.0.3", speed=10)],
    )
    networks, excluded = candidate_networks(node_addresses, None)
    assert "10.1.0.0/24" in network_names(networks)
    assert not any(member.address == "10.0.0.2" for network in networks for member in network.members.values())
    assert [(network.node, network.reason) for network in excluded] == [
        (1, "2 nodes have this address"),
        (2, "2 nodes have this address"),
    ]


def test_an_address_that_one_node_has_twice_is_its_own() -> None:
    twice = card("eth0", "10.0.0.1")
    networks, excluded = candidate_networks(make_addresses([twice, twice], [card("eth0", "10.0.0.2")]), None)
    assert (network_names(networks), excluded) == (["10.0.0.0/24"], [])


def test_of_two_interfaces_in_one_subnet_the_faster_one_counts_then_that_with_the_larger_mtu_then_the_first() -> None:
    def elected_interface(*of_node_1: Candidate) -> str:
        networks, _ = candidate_networks(make_addresses([card("ib0", "10.0.0.1")], of_node_1), None)
        return networks[0].interfaces[1]

    assert elected_interface(card("eth2", "10.0.0.2"), card("eth3", "10.0.0.3", speed=10_000)) == "eth3"
    assert elected_interface(card("eth2", "10.0.0.2"), card("eth3", "10.0.0.3", mtu=9000)) == "eth3"
    assert elected_interface(card("eth10", "10.0.0.2"), card("eth2", "10.0.0.3")) == "eth2"
    assert elected_interface(card("eth2", "10.0.0.2", speed=None), card("eth3", "10.0.0.3")) == "eth3"


def test_two_interfaces_in_one_subnet_are_told_apart_by_name() -> None:
    node_addresses = make_addresses(
        *([card("eth0", f"10.0.0.{node}"), card("eth1", f"10.0.0.{node + 100}")] for node in range(1, 4))
    )
    networks, _ = candidate_networks(node_addresses, None)
    assert [(network.name, set(network.interfaces.values())) for network in networks] == [
        ("10.0.0.0/24", {"eth0"}),
        ("interface eth1", {"eth1"}),
    ]


def test_nodes_with_ipv6_only_have_networks() -> None:
    networks, _ = candidate_networks(make_addresses([card("eth0", "fd00::1", 64)], [card("ens0", "fd00::2", 64)]), None)
    assert [(network.name, network.family) for network in networks] == [("fd00::/64", 6)]


def test_both_families_are_tried_ipv4_first() -> None:
    networks, _ = candidate_networks(
        make_addresses(*([card("eth0", f"fd00::{node}", 64), card("eth0", f"10.0.0.{node}")] for node in (1, 2))), None
    )
    assert network_names(networks) == ["10.0.0.0/24", "fd00::/64"]


def test_a_network_has_one_family() -> None:
    networks, _ = candidate_networks(make_addresses([card("eth0", "10.0.0.1")], [card("eth0", "fd00::2", 64)]), None)
    assert networks == []


def test_a_network_that_one_node_lacks_is_none() -> None:
    node_addresses = make_addresses(
        [card("eth0", "10.0.0.1"), card("ib0", "10.1.0.1", speed=400_000)],
        [card("eth0", "10.0.0.2"), card("ib0", "10.1.0.2", speed=400_000)],
        [card("eth0", "10.0.0.3")],
    )
    assert network_names(candidate_networks(node_addresses, None)[0]) == [
        "10.0.0.0/24",
        "the fastest of each node (IPv4)",
    ]
    assert candidate_networks(make_addresses([card("eth0", "10.0.0.1")], []), None)[0] == []


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


def test_a_network_is_as_good_as_its_worst_node() -> None:
    networks, _ = candidate_networks(
        make_addresses(
            [card("ib0", "10.0.0.1", mtu=2044, speed=100_000)], [card("ib0", "10.0.0.2", mtu=4092, speed=200_000)]
        ),
        None,
    )
    assert (networks[0].speed_mbps, networks[0].mtu, networks[0].kind) == (100_000, 2044, "infiniband")
    partly_unknown = Network("x", {0: card("a", "10.0.0.1"), 1: card("a", "10.0.0.2", speed=None)})
    assert partly_unknown.speed_mbps is None


# --- who tries whom ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 600))
def test_each_way_is_tried_in_both_directions_and_all_nodes_are_connected(nodes: int) -> None:
    targets = {node: probe_targets(node, nodes) for node in range(nodes)}
    for node, others in targets.items():
        assert others == sorted(set(others) - {node})
        assert all(0 <= other < nodes for other in others)
        assert all(node in targets[other] for other in others if other != 0)
        assert node == 0 or 0 in others
    if nodes <= ALL_PAIRS:
        assert all(len(others) == nodes - 1 for others in targets.values())
    else:
        assert all(len(others) <= 2 * math.log2(nodes) + 1 for others in targets.values())
    connected, frontier = {0}, {0}
    while frontier:
        frontier = {other for node in frontier for other in targets[node]} - connected
        connected |= frontier
    assert len(connected) == nodes


def test_the_next_node_is_always_among_those_who_are_tried() -> None:
    for nodes in range(2, 300):
        assert all((node + 1) % nodes in probe_targets(node, nodes) for node in range(nodes))


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
    assert culprits(cut_off([2], 4), 4) == [2]
    assert culprits(problems((0, 2), (1, 2), (3, 2)), 4) == [2]
    assert culprits(problems((2, 0), (2, 1), (2, 3)), 4) == [2]
    assert culprits(problems((0, 2), (2, 1)), 8) == [2]


def test_no_node_is_at_fault_without_problems() -> None:
    assert culprits([], 4) == []


@pytest.mark.parametrize("nodes", [2, 3, 4, 64])
def test_neither_node_of_a_single_pair_is_at_fault(nodes: int) -> None:
    assert culprits(problems((0, 1), (1, 0)), nodes) == []


def test_no_node_of_separate_pairs_is_at_fault() -> None:
    assert culprits(problems((0, 1), (2, 3)), 8) == []
    assert culprits(problems((0, 1), (1, 2), (2, 3)), 8) == []
    assert culprits(problems((0, 1), (1, 2), (2, 3), (3, 0)), 8) == []
    assert culprits(problems((0, 1), (1, 2), (2, 0)), 8) == []
    # Three that miss three others, but for one pair: either three will do.
    assert culprits(problems(*((a, b) for a in range(3) for b in range(3, 6) if (a, b) != (2, 5))), 7) == []


def test_half_of_all_nodes_are_never_at_fault() -> None:
    assert culprits(cut_off([0, 1], 4), 4) == []
    assert culprits(cut_off([0, 1, 2], 4), 4) == []
    assert culprits(cut_off([0, 1], 5), 5) == [0, 1]
    halves = problems(*((a, b) for a in range(4) for b in range(4, 8)))
    assert culprits(halves, 8) == []


@settings(deadline=None)
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


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.permutations([(0, 3), (1, 3), (2, 3), (4, 3), (4, 5), (5, 0), (5, 1), (2, 5)]))
def test_the_order_of_problems_does_not_matter(pairs: list[tuple[int, int]]) -> None:
    assert culprits(problems(*pairs), 6) == [3, 5]


# --- which one is best ------------------------------------------------------------------------------------------

LOST = problems((0, 1))


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


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(
            ProbedNetwork(make_network(speed=10, pinned=True)),
            ProbedNetwork(make_network(speed=400_000)),
            id="pinned-before-speed",
        ),
        pytest.param(
            ProbedNetwork(make_network(speed=200), rate=1.0),
            ProbedNetwork(make_network(speed=100), rate=1e9),
            id="speed-before-rate",
        ),
        pytest.param(
            ProbedNetwork(make_network(mtu=1500), rate=3e8),
            ProbedNetwork(make_network(mtu=9000), rate=1e8),
            id="rate-before-mtu",
        ),
        pytest.param(
            ProbedNetwork(make_network(mtu=9000), rate=1e8),
            ProbedNetwork(make_network(mtu=1500), rate=1.9e8),
            id="mtu-before-rate",
        ),
        pytest.param(
            ProbedNetwork(make_network(speed=None), rate=9e8),
            ProbedNetwork(make_network(speed=None), rate=1e8),
            id="rate-alone",
        ),
        pytest.param(
            ProbedNetwork(make_network(mtu=9000, family=6)),
            ProbedNetwork(make_network(mtu=1500, family=4)),
            id="mtu-before-family",
        ),
        pytest.param(
            ProbedNetwork(make_network(interface="eth9", family=4)),
            ProbedNetwork(make_network(interface="eth1", family=6)),
            id="family-before-name",
        ),
        pytest.param(
            ProbedNetwork(make_network(interface="eth2")),
            ProbedNetwork(make_network(interface="eth10")),
            id="natural-names",
        ),
        pytest.param(ProbedNetwork(make_network("a")), ProbedNetwork(make_network("b")), id="name-of-the-network"),
    ],
)
def test_the_better_one_is_elected_in_either_order(better: ProbedNetwork, worse: ProbedNetwork) -> None:
    assert elect([better, worse]) == 0
    assert elect([worse, better]) == 1


@pytest.mark.parametrize("among", range(1, 8))
def test_a_criterion_counts_only_where_those_before_it_are_equal(among: int) -> None:
    for names in itertools.combinations(RANKED, among):
        assert elect(names) == 0


def test_an_unknown_speed_may_be_the_best() -> None:
    partly_unknown, unknown = make_network(speed=None, mtu=9000), make_network(speed=100_000)
    assert elect([ProbedNetwork(unknown), ProbedNetwork(partly_unknown)]) == 1
    assert elect([ProbedNetwork(unknown, rate=9e8), ProbedNetwork(partly_unknown, rate=1e8)]) == 0
    slow = make_network(speed=10, mtu=9000)
    assert elect([ProbedNetwork(unknown), ProbedNetwork(slow)]) == 0


def test_a_rate_over_one_family_counts_for_the_other() -> None:
    four, six = make_network(family=4, mtu=1500, interface="eth1"), make_network(family=6, mtu=1500, interface="eth1")
    other = make_network(mtu=9000, interface="eth2")
    assert elect([ProbedNetwork(other, rate=1e8), ProbedNetwork(four), ProbedNetwork(six, rate=9e8)]) == 1


@settings(deadline=None)
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
    fast, fast_too, slow = (
        make_network(interface="ib0", speed=100),
        make_network(interface="ib1", speed=100),
        make_network(speed=10),
    )
    partly_unknown = make_network(interface="eth7", speed=None)
    assert networks_to_rate([ProbedNetwork(slow), ProbedNetwork(fast), ProbedNetwork(fast_too)]) == [1, 2]
    assert networks_to_rate([ProbedNetwork(fast), ProbedNetwork(slow)]) == []
    assert networks_to_rate([ProbedNetwork(fast), ProbedNetwork(partly_unknown), ProbedNetwork(slow)]) == [0, 1]
    assert networks_to_rate([ProbedNetwork(partly_unknown)]) == []
    assert networks_to_rate([]) == []


def test_rates_are_not_asked_for_of_networks_that_were_not_proved() -> None:
    fast, fast_too = make_network(interface="ib0"), make_network(interface="ib1")
    assert networks_to_rate([ProbedNetwork(fast), ProbedNetwork(fast_too, LOST)]) == []
    assert networks_to_rate([ProbedNetwork(fast, LOST), ProbedNetwork(fast_too, LOST)]) == []


def test_rates_are_asked_for_once_where_the_same_interfaces_have_two_families() -> None:
    four, six = make_network(family=4), make_network(family=6)
    assert networks_to_rate([ProbedNetwork(four), ProbedNetwork(six)]) == []
    assert networks_to_rate(
        [ProbedNetwork(four), ProbedNetwork(six), ProbedNetwork(make_network(interface="eth1"))]
    ) == [
        0,
        2,
    ]


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


@settings(deadline=None)
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


@settings(deadline=None)
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
