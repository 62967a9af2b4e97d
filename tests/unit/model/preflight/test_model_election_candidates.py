"""Which networks a run of several nodes could use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
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


def test_a_network_is_as_good_as_its_worst_node() -> None:
    networks, _ = candidate_networks(
        make_addresses(
            [card("ib0", "10.0.0.1", mtu=2044, speed=100_000)], [card("ib0", "10.0.0.2", mtu=4092, speed=200_000)]
        ),
        None,
    )
    assert (networks[0].speed_mbps, networks[0].mtu, networks[0].kind) == (100_000, 2044, "infiniband")
    mixed, _ = candidate_networks(make_addresses([card("hsn0", "10.1.0.1")], [card("ib0", "10.1.0.2")]), None)
    assert (dict(mixed[0].interfaces), mixed[0].kind) == ({0: "hsn0", 1: "ib0"}, "mixed")
    partly_unknown = Network("x", {0: card("a", "10.0.0.1"), 1: card("a", "10.0.0.2", speed=None)})
    assert partly_unknown.speed_mbps is None
