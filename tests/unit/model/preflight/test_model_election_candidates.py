"""Which networks a run of several nodes could use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from helpers.candidate_networks import addresses, card

from slurmtrain.model.preflight.election import (
    Candidate,
    Network,
    NodeAddresses,
    candidate_networks,
    nodes_without_interface,
)


def make_addresses(*nodes: Sequence[Candidate]) -> dict[int, NodeAddresses]:
    return {node: NodeAddresses(list(candidates)) for node, candidates in enumerate(nodes)}


def network_names(networks: Iterable[Network]) -> list[str]:
    return [network.name for network in networks]


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
