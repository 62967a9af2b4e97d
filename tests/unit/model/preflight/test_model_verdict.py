"""All findings added up: whether an attempt may start, why not, and without which nodes it could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.sections import BandwidthCheck, ClockCheck, NetworkCheck, PreflightSpec
from slurmtrain.model.experiment.spec import NetworkSpec as NetworkSection
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.clock import ClockOffset
from slurmtrain.model.preflight.election import Candidate, Network, NetworkProblem, NodeAddresses, ProbedNetwork
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.preflight.verdict import PreflightReports, Verdict, absence_verdict, judge_bandwidth, judge_nodes

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


def test_a_problem_names_at_most_a_few_hosts_and_failures() -> None:
    same = make_verdict({node: [failing()] for node in range(64)}, 64)
    assert same.problem == "node0, node1, node2 ...: disk: 0.2 GB free (limit 1 GB)"
    differing = make_verdict({node: [failing(summary=f"{node} GB free")] for node in range(64)}, 64)
    assert differing.problem == ("node0: disk: 0 GB free; node1: disk: 1 GB free; node2: disk: 2 GB free; and 61 more")


# --- without which nodes it could -------------------------------------------------------------------------------


_FINDINGS = st.builds(
    Finding,
    st.sampled_from(["disk", "gpu"]),
    st.sampled_from(["skip", "pass", "warn", "fail"]),
    st.sampled_from(["little", "less"]),
    st.sampled_from([{}, {"ambiguous": True}]),
)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(_FINDINGS, max_size=3), min_size=n, max_size=n)))
def test_only_nodes_with_a_failure_are_blamed_and_none_if_the_attempt_may_start(
    findings: list[list[Finding]],
) -> None:
    verdict = make_verdict(dict(enumerate(findings)), len(findings))
    failed = {node for node, of_node in enumerate(findings) if any(finding.status == "fail" for finding in of_node)}
    assert set(verdict.blamed) <= failed
    assert (verdict.problem is None) == (not failed)
    assert len(verdict.problem or "") < 300


# --- more findings ----------------------------------------------------------------------------------------------


def test_a_finding_can_be_added_to_some_nodes() -> None:
    before = make_verdict({0: [Finding("disk", "pass", "412 GB free")]}, 2)
    after = before.adding({0: failing("port", "no port is free", ambiguous=True)})
    assert [finding.check for finding in after.findings[0]] == ["disk", "port"]
    assert after.findings[1] == []
    assert after.problem == "node0: port: no port is free"
    assert after.blamed == []
    assert before.problem is None


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
        "probed": [ProbedNetwork(make_network(nodes))],
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


def test_a_node_that_is_apart_is_to_blame() -> None:
    lost = [NetworkProblem(source=node, target=2, reason="10.0.0.3: No route to host") for node in (0, 1)]
    unreachable = {"probed": [ProbedNetwork(make_network(3), lost)], "elected": None}
    verdict = judge_nodes(reports(**unreachable), spec())
    assert verdict.problem == (
        "node2: network: apart from node0, node1 on 10.0.0.0/24: node0 cannot reach node2: 10.0.0.3: No route to host"
    )
    assert verdict.blamed == [2]
    assert judge_nodes(reports(**unreachable), spec(network=NetworkCheck(level="warn"))).problem is None


def test_the_pinned_interface_is_that_of_the_spec() -> None:
    pinned = Spec(resources=ResourcesSpec(nodes=3), network=NetworkSection(interface="ib0"))
    verdict = judge_nodes(reports(), pinned)
    assert {status for status, _ in findings_of_check(verdict, "network").values()} == {"fail"}
    assert verdict.blamed == []


def test_where_no_network_is_needed_none_is_proved() -> None:
    alone = judge_nodes(reports(1, probed=None, elected=None, offsets={0: None}), spec(1))
    assert findings_of_check(alone, "network") == {0: ("skip", "one machine: there is nothing to prove")}
    assert findings_of_check(alone, "clock") == {0: ("pass", DISCIPLINE["description"])}
    assert alone.problem is None


def test_a_check_that_did_not_answer_is_to_blame() -> None:
    facts = {**reports().facts, 1: {"tmp": {"timeout": 30}}}
    verdict = judge_nodes(reports(facts=facts), spec())
    assert findings_of_check(verdict, "tmp")[1] == ("warn", "no answer within 30 s")
    facts = {**reports().facts, 1: {"disk": {"timeout": 30}}}
    assert judge_nodes(reports(facts=facts), spec()).problem == "node1: disk: no answer within 30 s"


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


def test_no_single_node_is_blamed_for_the_bandwidth() -> None:
    spec_ = Spec(preflight=PreflightSpec(bandwidth=BandwidthCheck(level="fail", min_gb_per_s=100)))
    findings = judge_bandwidth({0: FIGURES, 1: {"error": "killed"}}, spec_)
    verdict = make_verdict({}, 2).adding(findings)
    assert verdict.problem is not None
    assert verdict.blamed == []
