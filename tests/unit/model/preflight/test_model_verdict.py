"""All findings added up: whether an attempt may start, why not, and without which nodes it could."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import BandwidthCheck, ClockCheck, NetworkCheck, PreflightSpec
from slurmtrain.model.experiment.spec import NetworkSpec, Spec
from slurmtrain.model.preflight.checks import Finding
from slurmtrain.model.preflight.clock import ClockOffset
from slurmtrain.model.preflight.election import (
    Candidate,
    ExcludedAddress,
    Network,
    NetworkProblem,
    NodeAddresses,
    elect,
)
from slurmtrain.model.preflight.verdict import (
    PreflightReports,
    Verdict,
    absence_verdict,
    election_record,
    judge_bandwidth,
    judge_networks,
    judge_nodes,
)

DISCIPLINE = {"disciplined": True, "source": "chrony", "description": "chrony follows 10.0.0.1"}


def hosts(count: int) -> dict[int, str]:
    return {node: f"node{node}" for node in range(count)}


def make_verdict(findings: Mapping[int, Sequence[Finding]], count: int = 4) -> Verdict:
    return Verdict({node: findings.get(node, []) for node in range(count)}, hosts(count))


def failing(check: str = "disk", summary: str = "0.2 GB free (limit 1 GB)", **evidence: Any) -> Finding:
    return Finding(check, "fail", summary, evidence)


# --- why an attempt may not start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "problem", "blamed"),
    [
        ({}, None, []),
        ({0: [Finding("disk", "pass", "412 GB free")], 1: [Finding("tmp", "warn", "full")]}, None, []),
        ({2: [failing(), Finding("tmp", "warn", "full")]}, "node2: disk: 0.2 GB free (limit 1 GB)", [2]),
        ({1: [failing()], 3: [failing()]}, "node1, node3: disk: 0.2 GB free (limit 1 GB)", [1, 3]),
    ],
)
def test_a_problem_names_the_hosts_and_the_check(
    findings: dict[int, list[Finding]], problem: str | None, blamed: list[int]
) -> None:
    verdict = make_verdict(findings)
    assert (verdict.problem, verdict.blamed) == (problem, blamed)


# --- more findings ----------------------------------------------------------------------------------------------


def test_nodes_that_did_not_do_their_part_are_named_and_to_blame() -> None:
    verdict = absence_verdict([1, 3], hosts(4), "its agent has not reported in time")
    assert verdict.problem == "node1, node3: agent: its agent has not reported in time"
    assert verdict.blamed == [1, 3]
    assert verdict.findings[0] == []


# --- everything that was seen -----------------------------------------------------------------------------------


def make_network(nodes: int) -> Network:
    members = {
        node: Candidate(interface="eth0", address=f"10.0.0.{node + 1}", prefix=24, speed_mbps=1000)
        for node in range(nodes)
    }
    return Network("10.0.0.0/24", members)


def reports(nodes: int = 3, **differing: Any) -> PreflightReports:
    """Nodes with which all is well."""
    facts = {"tmp": {"path": "/tmp", "writable": True, "free": 5e11, "inodes": 9}}
    values: dict[str, Any] = {
        "hosts": hosts(nodes),
        "addresses": {node: NodeAddresses([make_network(nodes).members[node]]) for node in range(nodes)},
        "facts": dict.fromkeys(range(nodes), facts),
        "offsets": {node: ClockOffset(0.0, 1e-4 if node else 0.0, 32 if node else 0) for node in range(nodes)},
        "disciplines": dict.fromkeys(range(nodes), DISCIPLINE),
        "probed": [make_network(nodes)],
        "elected": 0,
    }
    return PreflightReports(**{**values, **differing})


def spec(nodes: int = 3, **sections: Any) -> Spec:
    return Spec(resources=ResourcesSpec(nodes=nodes), preflight=PreflightSpec(**sections))


def findings_of_check(verdict: Verdict, check: str) -> dict[int, tuple[str, str]]:
    return {
        node: (finding.status, finding.summary)
        for node, findings in verdict.findings.items()
        for finding in findings
        if finding.check == check
    }


def test_each_node_has_a_finding_of_its_clock_of_the_network_and_of_every_other_check() -> None:
    verdict = judge_nodes(reports(), spec())
    for findings in verdict.findings.values():
        checks = [finding.check for finding in findings]
        assert checks[:2] == ["clock", "network"]
        assert len(set(checks)) == len(checks)
        assert {"disk", "tmp", "versions", "gpu", "shared"} <= set(checks)
    assert findings_of_check(verdict, "tmp")[2] == ("pass", "500 GB free")
    assert findings_of_check(verdict, "network")[1] == ("pass", "eth0 on 10.0.0.0/24, 1 Gbit/s")
    assert verdict.problem is None


def test_a_clock_that_is_wrong_is_to_blame() -> None:
    offsets = {0: ClockOffset(0.0, 0.0, 0), 1: ClockOffset(5.003, 1e-4, 32), 2: ClockOffset(0.0, 1e-4, 32)}
    verdict = judge_nodes(reports(offsets=offsets), spec())
    assert verdict.problem == "node1: clock: 5.003 s ahead of node0 (± 0.1 ms, limit 1 s)"
    assert verdict.blamed == [1]
    assert judge_nodes(reports(offsets=offsets), spec(clock=ClockCheck(level="warn"))).problem is None
    assert "clock" not in {
        finding.check
        for finding in judge_nodes(reports(offsets=offsets), spec(clock=ClockCheck(level="off"))).findings[1]
    }


def test_where_no_network_is_needed_none_is_proved() -> None:
    alone = judge_nodes(reports(1, probed=None, elected=None, offsets={0: None}), spec(1))
    assert findings_of_check(alone, "network") == {0: ("skip", "one machine: there is nothing to test")}
    assert findings_of_check(alone, "clock") == {0: ("pass", DISCIPLINE["description"])}
    assert alone.problem is None


# --- bandwidth --------------------------------------------------------------------------------------------------

FIGURES = {"algbw_gb_s": 10.0, "busbw_gb_s": 17.5, "seconds": 0.0064, "ranks": 8, "size_mb": 64.0, "backend": "nccl"}


def bandwidth(facts: Mapping[str, Any], level: str = "fail", minimum: float | None = None) -> Finding:
    limits = PreflightSpec(bandwidth=BandwidthCheck(level=level, min_gb_per_s=minimum))
    [finding] = judge_bandwidth({3: facts}, Spec(preflight=limits)).values()
    return finding


AS_MEASURED = "17.5 GB/s of bus bandwidth, 10 GB/s of an all-reduce"
CLOSED = "Connection closed by peer"


@pytest.mark.parametrize(
    ("facts", "level", "minimum", "status", "summary"),
    [
        (FIGURES, "fail", None, "pass", AS_MEASURED),
        (FIGURES, "fail", 17.4, "pass", AS_MEASURED),
        (FIGURES, "fail", 17.5, "pass", AS_MEASURED),
        (FIGURES, "fail", 17.6, "fail", f"{AS_MEASURED} (limit 17.6 GB/s)"),
        ({"error": CLOSED}, "fail", None, "fail", CLOSED),
        ({"error": CLOSED}, "warn", None, "warn", CLOSED),
        ({"skip": "there is only one rank"}, "fail", None, "skip", "there is only one rank"),
    ],
)
def test_a_bandwidth_is_judged_by_its_limit(
    facts: dict[str, Any], level: str, minimum: float | None, status: str, summary: str
) -> None:
    finding = bandwidth(facts, level, minimum)
    assert (finding.check, finding.status, finding.summary) == ("bandwidth", status, summary)
    assert finding.evidence.get("busbw_gb_s") == facts.get("busbw_gb_s")


# --- what the proof of the networks says of each node, in words ---------------------------------------------------


def network_over(nodes: int, name: str, interface: str, speed: int | None = None, *, pinned: bool = False) -> Network:
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
    return network_over(nodes, "10.1.0.0/24", "ib0", 200_000, **options)


def slow(nodes: int = 4, **options: bool) -> Network:
    return network_over(nodes, "10.0.0.0/24", "eth0", 1000, **options)


def unreachable(*pairs: tuple[int, int], reason: str = "10.1.0.3 does not answer within 2 s") -> list[NetworkProblem]:
    return [NetworkProblem(source=source, target=target, reason=reason) for source, target in pairs]


# Node 2 reaches nobody, and nobody reaches it.
WITHOUT_2 = unreachable((0, 2), (1, 2), (3, 2), (2, 0), (2, 1), (2, 3))


def reports_of_networks(probed: Sequence[Network], addresses: Mapping[int, NodeAddresses]) -> PreflightReports:
    hosts = {node: f"node{node}" for node in addresses}
    nothing: dict[int, Any] = {node: {} for node in addresses}
    return PreflightReports(
        hosts=hosts,
        addresses=addresses,
        facts=nothing,
        offsets={},
        disciplines={},
        probed=probed,
        elected=elect(probed),
    )


def judge(
    probed: Sequence[Network], *, pinned: str = "auto", level: str = "fail", lacks: Iterable[int] = ()
) -> list[Finding]:
    """The nodes' findings, in order; nodes in ``lacks`` have eth0 only."""
    nodes = len(probed[0].members) if probed else 4
    cards = {
        node: [Candidate(interface=name, address=f"10.9.{node}.1", prefix=24) for name in ("eth0", "ib0")]
        for node in range(nodes)
    }
    node_addresses = {
        node: NodeAddresses(cards[node][:1] if node in set(lacks) else cards[node]) for node in range(nodes)
    }
    spec = Spec(network=NetworkSpec(interface=pinned), preflight=PreflightSpec(network=NetworkCheck(level=level)))
    findings = judge_networks(reports_of_networks(probed, node_addresses), spec)
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
        findings = judge([fast(), replace(slow(), problems=worse)])
        assert statuses(findings) == ["pass"] * 4
        assert {finding.summary for finding in findings} == {"ib0 on 10.1.0.0/24, 200 Gbit/s"}
    pinned = judge([slow(pinned=True), fast()], pinned="eth0")
    assert statuses(pinned) == ["pass"] * 4
    assert pinned[0].summary == "eth0 on 10.0.0.0/24, 1 Gbit/s"


def test_a_better_network_that_is_blocked_at_one_node_is_a_warning_of_that_node() -> None:
    findings = judge([replace(fast(), problems=WITHOUT_2), slow()])
    assert statuses(findings) == ["pass", "pass", "warn", "pass"]
    assert findings[0].summary == "eth0 on 10.0.0.0/24, 1 Gbit/s"
    assert findings[2].summary == (
        "eth0 on 10.0.0.0/24, 1 Gbit/s; ib0 on 10.1.0.0/24, 200 Gbit/s would be faster, but apart from node0, node1, "
        "node3 on 10.1.0.0/24: node0 cannot reach node2: 10.1.0.3 does not answer within 2 s"
    )


# --- no network that reaches all --------------------------------------------------------------------------------


def test_a_node_that_is_apart_on_every_network_fails_alone() -> None:
    findings = judge([replace(fast(), problems=WITHOUT_2), replace(slow(), problems=WITHOUT_2)])
    assert statuses(findings) == ["pass", "pass", "fail", "pass"]
    assert findings[2].summary == (
        "apart from node0, node1, node3 on 10.1.0.0/24: node0 cannot reach node2: 10.1.0.3 does not answer within 2 s"
    )
    assert ambiguous(findings) == [False] * 4


def test_of_a_pair_that_is_apart_both_fail_and_none_is_surely_at_fault() -> None:
    findings = judge(
        [replace(fast(), problems=unreachable((1, 3), (3, 1))), replace(slow(), problems=unreachable((1, 3)))]
    )
    assert statuses(findings) == ["pass", "fail", "pass", "fail"]
    text = "10.1.0.3 does not answer within 2 s"
    assert findings[1].summary == f"node1 cannot reach node3: {text}; node3 cannot reach node1: {text}"
    assert findings[3].summary == findings[1].summary
    assert ambiguous(findings) == [False, True, False, True]


@pytest.mark.parametrize(
    "probed",
    [
        [replace(fast(2), problems=unreachable((0, 1)))],
        # Networks accuse different nodes, or one of them accuses none.
        [replace(fast(), problems=WITHOUT_2), replace(slow(), problems=unreachable((0, 1), (2, 1), (3, 1)))],
        [replace(fast(), problems=WITHOUT_2), replace(slow(), problems=unreachable((2, 0)))],
    ],
)
def test_where_none_is_surely_at_fault_all_fail(probed: list[Network]) -> None:
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


# --- an interface that the spec asks for ------------------------------------------------------------------------


def test_a_node_without_the_pinned_interface_fails_with_what_it_has() -> None:
    findings = judge([slow()], pinned="ib0", lacks=[1])
    assert statuses(findings) == ["pass", "fail", "pass", "pass"]
    assert findings[1].summary == "ib0 (network.interface) does not exist, or is down; it has eth0"
    assert ambiguous(findings) == [False] * 4
    assert statuses(judge([slow()], pinned="hsn7")) == ["fail"] * 4


def test_the_pinned_interface_counts_even_where_another_one_reaches_all() -> None:
    findings = judge([replace(fast(pinned=True), problems=WITHOUT_2), slow()], pinned="ib0")
    assert statuses(findings) == ["pass", "pass", "fail", "pass"]
    assert findings[2].summary.startswith("apart from node0, node1, node3 on 10.1.0.0/24: ")


# --- evidence ---------------------------------------------------------------------------------------------------

HOSTS: Mapping[int, str] = {0: "alpha", 1: "beta"}


def test_the_record_of_the_election_has_every_network_and_its_problems() -> None:
    probed = [replace(fast(2), problems=unreachable((0, 1))), replace(slow(2, pinned=True), rate=117_649_000.0)]
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


def test_a_finding_can_be_added_to_some_nodes() -> None:
    before = make_verdict({0: [Finding("disk", "pass", "412 GB free")]}, 2)
    after = before.adding({0: failing("port", "no port is free", ambiguous=True)})
    assert [finding.check for finding in after.findings[0]] == ["disk", "port"]
    assert after.findings[1] == []
    assert after.problem == "node0: port: no port is free"
    assert after.blamed == []
    assert before.problem is None
