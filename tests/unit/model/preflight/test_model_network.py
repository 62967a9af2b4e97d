"""What the proof of the networks says of each node, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from slurmtrain.model.preflight.election import (
    Candidate,
    ExcludedAddress,
    Network,
    NetworkProblem,
    NodeAddresses,
    ProbedNetwork,
    elect,
)
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.preflight.network import ElectionResult, election_record, judge_networks


def make_network(nodes: int, name: str, interface: str, speed: int | None = None, *, pinned: bool = False) -> Network:
    third = 1 if interface.startswith("ib") else 0
    members = {
        node: Candidate(
            interface=interface,
            address=f"10.{third}.0.{node + 1}",
            prefix=24,
            speed_mbps=speed,
            kind="infiniband" if third else "ethernet",
        )
        for node in range(nodes)
    }
    return Network(name, members, pinned)


def fast(nodes: int = 4, **options: bool) -> Network:
    return make_network(nodes, "10.1.0.0/24", "ib0", 200_000, **options)


def slow(nodes: int = 4, **options: bool) -> Network:
    return make_network(nodes, "10.0.0.0/24", "eth0", 1000, **options)


def unreachable(*pairs: tuple[int, int], reason: str = "10.1.0.3 does not answer within 2 s") -> list[NetworkProblem]:
    return [NetworkProblem(source=source, target=target, reason=reason) for source, target in pairs]


# Node 2 reaches nobody, and nobody reaches it.
WITHOUT_2 = unreachable((0, 2), (1, 2), (3, 2), (2, 0), (2, 1), (2, 3))


def judge(
    probed: Sequence[ProbedNetwork], *, pinned: str | None = None, level: str = "fail", lacks: Iterable[int] = ()
) -> list[Finding]:
    """The nodes' findings, in order; nodes in ``lacks`` have eth0 only."""
    nodes = len(probed[0].network.members) if probed else 4
    cards = {
        node: [Candidate(interface=name, address=f"10.9.{node}.1", prefix=24) for name in ("eth0", "ib0")]
        for node in range(nodes)
    }
    node_addresses = {
        node: NodeAddresses(cards[node][:1] if node in set(lacks) else cards[node]) for node in range(nodes)
    }
    hosts = {node: f"node{node}" for node in range(nodes)}
    result = ElectionResult(probed=probed, elected=elect(probed), addresses=node_addresses, hosts=hosts, pinned=pinned)
    findings = judge_networks(result, level)
    assert list(findings) == list(range(nodes))
    assert all(network.check == "network" for network in findings.values())
    return list(findings.values())


def statuses(findings: Iterable[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def ambiguous(findings: Iterable[Finding]) -> list[bool]:
    return [bool(finding.evidence.get("ambiguous")) for finding in findings]


# --- a network that reaches all ---------------------------------------------------------------------------------


def test_nodes_that_all_reach_each_other_pass_with_the_network_that_was_elected() -> None:
    # It is no matter if a worse one is blocked.
    for worse in ([], WITHOUT_2):
        findings = judge([ProbedNetwork(fast()), ProbedNetwork(slow(), worse)])
        assert statuses(findings) == ["pass"] * 4
        assert {finding.summary for finding in findings} == {"ib0 on 10.1.0.0/24, 200 Gbit/s"}
    pinned = judge([ProbedNetwork(slow(pinned=True)), ProbedNetwork(fast())], pinned="eth0")
    assert statuses(pinned) == ["pass"] * 4
    assert pinned[0].summary == "eth0 on 10.0.0.0/24, 1 Gbit/s"


def test_a_summary_names_all_interfaces_and_has_the_speed_if_it_is_known() -> None:
    network = fast(2)
    other = replace(network.members[1], interface="hsn0")
    for elected, text in (
        (make_network(2, "10.0.0.0/24", "eth0", 2500), "eth0 on 10.0.0.0/24, 2.5 Gbit/s"),
        (make_network(2, "interface eth0", "eth0"), "eth0 on interface eth0"),
        (Network(network.name, {0: network.members[0], 1: other}), "hsn0/ib0 on 10.1.0.0/24, 200 Gbit/s"),
    ):
        assert judge([ProbedNetwork(elected)])[1].summary == text


def test_a_better_network_that_is_blocked_at_one_node_is_a_warning_of_that_node() -> None:
    findings = judge([ProbedNetwork(fast(), WITHOUT_2), ProbedNetwork(slow())])
    assert statuses(findings) == ["pass", "pass", "warn", "pass"]
    assert findings[0].summary == "eth0 on 10.0.0.0/24, 1 Gbit/s"
    assert findings[2].summary == (
        "eth0 on 10.0.0.0/24, 1 Gbit/s; ib0 on 10.1.0.0/24, 200 Gbit/s would be better, but apart from node0, node1, "
        "node3 on 10.1.0.0/24: node0 cannot reach node2: 10.1.0.3 does not answer within 2 s"
    )


def test_a_better_network_in_which_one_pair_is_apart_is_a_warning_of_both() -> None:
    findings = judge([ProbedNetwork(fast(), unreachable((3, 1))), ProbedNetwork(slow())])
    assert statuses(findings) == ["pass", "warn", "pass", "warn"]
    assert "apart from node3 on 10.1.0.0/24: node3 cannot reach node1: 10.1.0.3" in findings[1].summary
    assert "apart from node1 on 10.1.0.0/24" in findings[3].summary


# --- no network that reaches all --------------------------------------------------------------------------------


def test_a_node_that_is_apart_on_every_network_fails_alone() -> None:
    findings = judge([ProbedNetwork(fast(), WITHOUT_2), ProbedNetwork(slow(), WITHOUT_2)])
    assert statuses(findings) == ["pass", "pass", "fail", "pass"]
    assert findings[2].summary == (
        "apart from node0, node1, node3 on 10.1.0.0/24: node0 cannot reach node2: 10.1.0.3 does not answer within 2 s"
    )
    assert ambiguous(findings) == [False] * 4


def test_of_a_pair_that_is_apart_both_fail_and_none_is_surely_at_fault() -> None:
    findings = judge([ProbedNetwork(fast(), unreachable((1, 3), (3, 1))), ProbedNetwork(slow(), unreachable((1, 3)))])
    assert statuses(findings) == ["pass", "fail", "pass", "fail"]
    text = "10.1.0.3 does not answer within 2 s"
    assert findings[1].summary == f"node1 cannot reach node3: {text}; node3 cannot reach node1: {text}"
    assert findings[3].summary == findings[1].summary
    assert ambiguous(findings) == [False, True, False, True]


@pytest.mark.parametrize(
    "probed",
    [
        [ProbedNetwork(fast(2), unreachable((0, 1)))],
        # Networks accuse different nodes, or one of them accuses none.
        [ProbedNetwork(fast(), WITHOUT_2), ProbedNetwork(slow(), unreachable((0, 1), (2, 1), (3, 1)))],
        [ProbedNetwork(fast(), WITHOUT_2), ProbedNetwork(slow(), unreachable((2, 0)))],
    ],
)
def test_where_none_is_surely_at_fault_all_fail(probed: list[ProbedNetwork]) -> None:
    findings = judge(probed)
    assert set(statuses(findings)) == {"fail"}
    assert all(ambiguous(findings))


def test_nodes_without_a_network_in_common_all_fail_with_what_they_have() -> None:
    findings = judge([])
    assert statuses(findings) == ["fail"] * 4
    assert {finding.summary for finding in findings} == {
        "the nodes have no network in common (node0: it has eth0, ib0; node1: it has eth0, ib0; node2: it has eth0, "
        "ib0; node3: it has eth0, ib0)"
    }
    assert ambiguous(findings) == [True] * 4


def test_no_more_than_a_few_nodes_are_named() -> None:
    nodes = 20
    node_addresses = {node: NodeAddresses([]) for node in range(nodes)}
    hosts = {node: f"node{node}" for node in range(nodes)}
    nothing_in_common = ElectionResult(probed=[], elected=None, addresses=node_addresses, hosts=hosts)
    without_network = judge_networks(nothing_in_common, "fail")
    assert without_network[19].summary.count("it has no usable interface") == 4
    problems = unreachable(*((node, 7) for node in range(nodes) if node != 7))
    cut_off = judge_networks(replace(nothing_in_common, probed=[ProbedNetwork(fast(nodes), problems)]), "fail")
    assert statuses(cut_off.values()).count("fail") == 1
    assert cut_off[7].summary.startswith(
        "apart from node0, node1, node2, node3 and others on 10.1.0.0/24: node0 cannot"
    )


# --- an interface that the spec asks for ------------------------------------------------------------------------


def test_a_node_without_the_pinned_interface_fails_with_what_it_has() -> None:
    findings = judge([ProbedNetwork(slow())], pinned="ib0", lacks=[1])
    assert statuses(findings) == ["pass", "fail", "pass", "pass"]
    assert findings[1].summary == "ib0 (network.interface) is not there, or down; it has eth0"
    assert ambiguous(findings) == [False] * 4
    assert statuses(judge([ProbedNetwork(slow())], pinned="hsn7")) == ["fail"] * 4


def test_the_pinned_interface_counts_even_where_another_one_reaches_all() -> None:
    findings = judge([ProbedNetwork(fast(pinned=True), WITHOUT_2), ProbedNetwork(slow())], pinned="ib0")
    assert statuses(findings) == ["pass", "pass", "fail", "pass"]
    assert findings[2].summary.startswith("apart from node0, node1, node3 on 10.1.0.0/24: ")


def test_a_pinned_interface_that_connects_nothing_is_no_network_in_common() -> None:
    findings = judge([ProbedNetwork(slow())], pinned="ib0")
    assert statuses(findings) == ["fail"] * 4
    assert findings[0].summary.startswith("the nodes have no network in common (node0: it has eth0, ib0; ")


# --- levels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probed",
    [[ProbedNetwork(fast(), WITHOUT_2)], [ProbedNetwork(fast(), unreachable((0, 1)))], []],
    ids=["one", "pair", "none"],
)
def test_at_a_level_of_warn_no_node_fails(probed: list[ProbedNetwork]) -> None:
    failed, warned = judge(probed), judge(probed, level="warn")
    assert statuses(warned) == [{"fail": "warn"}.get(network.status, network.status) for network in failed]
    assert "fail" in statuses(failed)
    assert [network.summary for network in warned] == [network.summary for network in failed]


# --- evidence ---------------------------------------------------------------------------------------------------

HOSTS: Mapping[int, str] = {0: "alpha", 1: "beta"}


def test_the_record_of_the_election_has_every_network_and_its_problems() -> None:
    probed = [ProbedNetwork(fast(2), unreachable((0, 1))), ProbedNetwork(slow(2, pinned=True), rate=117_649_000.0)]
    excluded = [ExcludedAddress(node=1, interface="br0", address="172.17.0.1", reason="2 nodes have this address")]
    record = election_record(probed, 1, excluded, HOSTS, 6).to_json()
    assert record == {
        "networks": [
            {
                "name": "10.1.0.0/24", "family": 4, "kind": "infiniband", "speed_mbps": 200_000, "mtu": 1500,
                "interfaces": {"alpha": "ib0", "beta": "ib0"}, "addresses": {"alpha": "10.1.0.1", "beta": "10.1.0.2"},
                "measured_mb_per_s": None, "pinned": False, "proved": False,
                "problems": ["alpha cannot reach beta: 10.1.0.3 does not answer within 2 s"],
            },
            {
                "name": "10.0.0.0/24", "family": 4, "kind": "ethernet", "speed_mbps": 1000, "mtu": 1500,
                "interfaces": {"alpha": "eth0", "beta": "eth0"}, "addresses": {"alpha": "10.0.0.1", "beta": "10.0.0.2"},
                "measured_mb_per_s": 117.6, "pinned": True, "proved": True, "problems": [],
            },
        ],
        "excluded": [{"host": "beta", "interface": "br0", "address": "172.17.0.1", "why": "2 nodes have this address"}],
        "elected": 1,
        "tests": 6,
    }  # fmt: skip
    assert json.loads(json.dumps(record, allow_nan=False)) == record
