"""The verdict over all nodes of an attempt: whether it may start, why not, and without which nodes it could. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.checks import blamed_nodes, judge_checks
from slurmtrain.model.preflight.clock import ClockOffset, judge_clocks
from slurmtrain.model.preflight.election import NodeAddresses, ProbedNetwork
from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.preflight.network import ElectionResult, judge_networks

# How many failures, and how many hosts of each, a verdict's problem names.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReports:
    """What all nodes reported, each by node.

    Attributes:
        hosts: The nodes' names.
        addresses: The addresses that they could train over.
        facts: Their measurements of themselves, by check.
        offsets: How far their clocks are ahead of node 0's; None for a node that could not compare it.
        disciplines: What synchronises their clocks.
        probed: The networks; None if none is needed, for one node or all on one machine.
        elected: The index of the network to train over; None if there is none.
    """

    hosts: Mapping[int, str]
    addresses: Mapping[int, NodeAddresses]
    facts: Mapping[int, Mapping[str, Mapping[str, Any]]]
    offsets: Mapping[int, ClockOffset | None]
    disciplines: Mapping[int, Mapping[str, Any]]
    probed: Sequence[ProbedNetwork] | None = None
    elected: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings and the names of the hosts, by node."""

    findings: Mapping[int, Sequence[Finding]]
    hosts: Mapping[int, str] = field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        """Why no worker may start: the first few failures, each with its hosts; None if there is none."""
        # Grouped by text: a failure that hundreds of nodes share is one line.
        failures: dict[str, list[str]] = {}
        for node, findings in self.findings.items():
            for finding in findings:
                if finding.status == "fail":
                    failures.setdefault(f"{finding.check}: {finding.summary}", []).append(self.hosts[node])
        shown = [f"{_name_some(hosts)}: {failure}" for failure, hosts in list(failures.items())[:_MAX_NAMED]]
        more = f"; and {len(failures) - _MAX_NAMED} more" if len(failures) > _MAX_NAMED else ""
        return "; ".join(shown) + more if failures else None

    @property
    def blamed(self) -> list[int]:
        """The nodes without which the attempt could start."""
        return sorted(blamed_nodes(self.findings))

    def adding(self, more: Mapping[int, Finding]) -> Verdict:
        """The verdict with one more finding for each node in ``more``."""
        added = {
            node: [*findings, *([more[node]] if node in more else [])] for node, findings in self.findings.items()
        }  # fmt: skip
        return Verdict(added, self.hosts)


def _name_some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:_MAX_NAMED]) + (" ..." if len(hosts) > _MAX_NAMED else "")


def judge_nodes(reports: PreflightReports, spec: Spec) -> Verdict:
    """Judge every check of every node: the clock and the network first."""
    # In display order: first what concerns several nodes, then what concerns each node alone.
    findings: dict[int, list[Finding]] = {node: [] for node in reports.facts}
    if spec.preflight.clock.level != "off":
        clocks = judge_clocks(reports.offsets, reports.disciplines, spec.preflight.clock, reports.hosts)
        for node, finding in clocks.items():
            findings[node].append(finding)
    for node, finding in _network_findings(reports, spec).items():
        findings[node].append(finding)
    for node, others in judge_checks(reports.facts, spec, reports.hosts).items():
        findings[node] += others
    return Verdict(findings, reports.hosts)


def _network_findings(reports: PreflightReports, spec: Spec) -> Mapping[int, Finding]:
    if reports.probed is None:
        return dict.fromkeys(reports.facts, Finding("network", "skip", "one machine: there is nothing to prove"))
    result = ElectionResult(
        probed=reports.probed,
        elected=reports.elected,
        addresses=reports.addresses,
        hosts=reports.hosts,
        pinned=None if spec.network.interface == "auto" else spec.network.interface,
    )
    return judge_networks(result, spec.preflight.network.level)


def absence_verdict(nodes: Sequence[int], hosts: Mapping[int, str], reason: str) -> Verdict:
    """The verdict if some nodes have not done their part: nothing else is known.

    Args:
        nodes: The nodes that have not.
        hosts: The names of all nodes.
        reason: What the nodes have not done.
    """
    # Not ambiguous: the attempt can do without a node whose agent does not report.
    missing = Finding("agent", "fail", reason)
    return Verdict({node: [missing] if node in nodes else [] for node in hosts}, hosts)


def judge_bandwidth(facts: Mapping[int, Mapping[str, Any]], spec: Spec) -> dict[int, Finding]:
    """Judge the all-reduce of all ranks: one figure, so no single node is to blame."""
    findings = {node: _bandwidth_finding(of_node, spec) for node, of_node in facts.items()}
    return {node: apply_level(finding, spec.preflight.bandwidth.level) for node, finding in findings.items()}


def _bandwidth_finding(facts: Mapping[str, Any], spec: Spec) -> Finding:
    if "skip" in facts or "error" in facts:
        # Ambiguous: ranks of one node may fail because another node's ranks did.
        status = "skip" if "skip" in facts else "fail"
        return Finding("bandwidth", status, str(facts.get("skip") or facts["error"]), {"ambiguous": True})
    bus_gb_per_s, limit = facts["busbw_gb_s"], spec.preflight.bandwidth.min_gb_per_s
    too_low = limit is not None and bus_gb_per_s < limit
    summary = f"{bus_gb_per_s:.3g} GB/s of bus bandwidth, {facts['algbw_gb_s']:.3g} GB/s of an all-reduce"
    summary += f" (limit {limit:g} GB/s)" if too_low else ""
    return Finding("bandwidth", "fail" if too_low else "pass", summary, {**facts, "ambiguous": True})
