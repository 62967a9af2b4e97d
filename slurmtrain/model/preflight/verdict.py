"""The verdict over all nodes of an attempt: whether it may start, why not, and without which nodes it could. Pure.

The network is judged here, too: what its probes mean for each node, and the record of its election.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.hostlist import name_some
from slurmtrain.model.preflight.checks import Finding, apply_level, blamed_nodes, judge_checks
from slurmtrain.model.preflight.clock import ClockOffset, judge_clocks
from slurmtrain.model.preflight.election import (
    ExcludedAddress,
    Network,
    NetworkProblem,
    NodeAddresses,
    better_unproved_networks,
    culprits,
    nodes_without_interface,
)
from slurmtrain.model.run.events.agent_events import NetworkElected

# How many failures a verdict's problem names.
_MAX_FAILURES = 3
# How many nodes, or interfaces, a finding of the network names.
_MAX_NAMED = 4

# Summary and evidence of a failure.
_Failure = tuple[str, dict[str, Any]]


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
    probed: Sequence[Network] | None = None
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
        shown = [f"{name_some(hosts)}: {failure}" for failure, hosts in list(failures.items())[:_MAX_FAILURES]]
        more = f"; and {len(failures) - _MAX_FAILURES} more" if len(failures) > _MAX_FAILURES else ""
        return "; ".join(shown) + more if failures else None

    @property
    def blamed(self) -> list[int]:
        """The nodes without which the attempt could start."""
        return sorted(blamed_nodes(self.findings))

    def adding(self, more: Mapping[int, Finding]) -> Verdict:
        """The verdict with one more finding for each node in ``more``."""
        added = {node: [*findings, more[node]] for node, findings in self.findings.items() if node in more}
        return Verdict({**self.findings, **added}, self.hosts)


def judge_nodes(reports: PreflightReports, spec: Spec) -> Verdict:
    """Judge every check of every node: the clock and the network first."""
    # In display order: first what concerns several nodes, then what concerns each node alone.
    findings: dict[int, list[Finding]] = {node: [] for node in reports.facts}
    if spec.preflight.clock.level != "off":
        clocks = judge_clocks(reports.offsets, reports.disciplines, spec.preflight.clock, reports.hosts)
        for node, finding in clocks.items():
            findings[node].append(finding)
    for node, finding in judge_networks(reports, spec).items():
        findings[node].append(finding)
    for node, others in judge_checks(reports.facts, spec, reports.hosts).items():
        findings[node] += others
    return Verdict(findings, reports.hosts)


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
    level, limit = spec.preflight.bandwidth.level, spec.preflight.bandwidth.min_gb_per_s
    findings = {}
    for node, of_node in facts.items():
        # Ambiguous: ranks of one node may fail because another node's ranks did.
        evidence = {"ambiguous": True}
        if "skip" in of_node or "error" in of_node:
            status, summary = "skip" if "skip" in of_node else "fail", str(of_node.get("skip") or of_node["error"])
        else:
            too_low = limit is not None and of_node["busbw_gb_s"] < limit
            status = "fail" if too_low else "pass"
            summary = f"{of_node['busbw_gb_s']:.3g} GB/s of bus bandwidth, {of_node['algbw_gb_s']:.3g} GB/s of an "
            summary += "all-reduce" + (f" (limit {limit:g} GB/s)" if too_low else "")
            evidence = {**of_node, **evidence}
        findings[node] = apply_level(Finding("bandwidth", status, summary, evidence), level)
    return findings


# --- the network ------------------------------------------------------------------------------------------------


def judge_networks(reports: PreflightReports, spec: Spec) -> dict[int, Finding]:
    """A finding for each node: whether it has a network that reaches all others, and whether that is the best it has.

    If a single pair cannot connect, either of the two may be at fault: both fail, with ``ambiguous`` as evidence.
    """
    probed, hosts = reports.probed, reports.hosts
    if probed is None:
        return dict.fromkeys(reports.facts, Finding("network", "skip", "one machine: there is nothing to test"))
    failed = _network_failures(reports, probed, None if spec.network.interface == "auto" else spec.network.interface)
    warned: dict[int, str] = {}
    # Where nothing is elected because of other nodes, these have failed.
    passed = "this node can be reached, but not all others can"
    if reports.elected is not None:
        passed = _describe_network(probed[reports.elected])
        for better in better_unproved_networks(probed, reports.elected):
            for node in culprits(better.problems, len(better.members)) or _involved_nodes(better):
                culprit = _describe_culprit(node, better, hosts)
                # The best of several better networks comes first, and is worth the warning.
                warned.setdefault(node, f"{passed}; {_describe_network(better)} would be faster, but {culprit}")
    findings = {}
    for node in reports.addresses:
        finding = Finding("network", "warn" if node in warned else "pass", warned.get(node, passed))
        if node in failed:
            finding = Finding("network", "fail", *failed[node])
        findings[node] = apply_level(finding, spec.preflight.network.level)
    return findings


def election_record(
    probed: Sequence[Network],
    elected: int | None,
    excluded: Iterable[ExcludedAddress],
    hosts: Mapping[int, str],
    tests: int,
) -> NetworkElected:
    """The election as it is journaled: every network that was probed, and why it was elected or not.

    Args:
        probed: The networks.
        elected: The index of the elected one; None if none is proved.
        excluded: Addresses that were not candidates.
        hosts: The names of the nodes.
        tests: Connections that all nodes made for it.
    """
    networks = [
        {
            "name": candidate.name,
            "family": candidate.family,
            "interfaces": {hosts[node]: member.interface for node, member in candidate.members.items()},
            "addresses": {hosts[node]: member.address for node, member in candidate.members.items()},
            "kind": candidate.kind,
            "speed_mbps": candidate.speed_mbps,
            "mtu": candidate.mtu,
            "measured_mb_per_s": None if candidate.rate is None else round(candidate.rate / 1e6, 1),
            "pinned": candidate.pinned,
            "proved": candidate.proved,
            "problems": [_describe_problem(problem, hosts) for problem in candidate.problems],
        }
        for candidate in probed
    ]
    left_out = [
        {"host": hosts[each.node], "interface": each.interface, "address": each.address, "why": each.reason}
        for each in excluded
    ]
    return NetworkElected(networks=networks, excluded=left_out, elected=elected, tests=tests)


def _network_failures(reports: PreflightReports, probed: Sequence[Network], pinned: str | None) -> dict[int, _Failure]:
    """The failures of the nodes that fail; ``pinned`` is the interface that the spec names, None for any."""
    addresses, hosts = reports.addresses, reports.hosts
    if reports.elected is not None and (pinned is None or probed[reports.elected].pinned):
        return {}
    # Most specific first: nodes that lack the interface explain everything that follows from it.
    lacking = nodes_without_interface(addresses, pinned) if pinned is not None else []
    if lacking:
        missing = f"{pinned} (network.interface) does not exist, or is down"
        return {node: (f"{missing}; {_describe_interfaces(addresses[node])}", {}) for node in lacking}
    acceptable = [candidate for candidate in probed if candidate.pinned] if pinned else probed
    if not acceptable:
        some = list(addresses.items())[:_MAX_NAMED]
        interfaces = "; ".join(f"{hosts[node]}: {_describe_interfaces(own)}" for node, own in some)
        summary = f"the nodes have no network in common ({interfaces})"
        return dict.fromkeys(addresses, (summary, {"ambiguous": True}))
    # Only a node that is cut off on every network keeps all others from training.
    cut_off = set.intersection(*(set(culprits(candidate.problems, len(addresses))) for candidate in acceptable))
    if cut_off:
        return {node: (_describe_culprit(node, acceptable[0], hosts), {}) for node in cut_off}
    involved = sorted({node for candidate in acceptable for node in _involved_nodes(candidate)})
    # The first two problems are usually both directions of one pair.
    summary = "; ".join(_describe_problem(problem, hosts) for problem in acceptable[0].problems[:2])
    return dict.fromkeys(involved, (summary, {"ambiguous": True}))


def _involved_nodes(network: Network) -> list[int]:
    return sorted({node for problem in network.problems for node in (problem.source, problem.target)})


def _describe_problem(problem: NetworkProblem, hosts: Mapping[int, str]) -> str:
    return f"{hosts[problem.source]} cannot reach {hosts[problem.target]}: {problem.reason}"


def _describe_culprit(node: int, network: Network, hosts: Mapping[int, str]) -> str:
    own_problems = [problem for problem in network.problems if node in (problem.source, problem.target)]
    others = sorted({other for problem in own_problems for other in (problem.source, problem.target)} - {node})
    names = name_some([hosts[other] for other in others], _MAX_NAMED)
    return f"apart from {names} on {network.name}: {_describe_problem(own_problems[0], hosts)}"


def _describe_network(candidate: Network) -> str:
    names = sorted(set(candidate.interfaces.values()))
    speed_mbps = candidate.speed_mbps
    speed = f", {speed_mbps / 1000:g} Gbit/s" if speed_mbps else ""
    return f"{'/'.join(names[:_MAX_NAMED])} on {candidate.name}{speed}"


def _describe_interfaces(addresses: NodeAddresses) -> str:
    names = dict.fromkeys(candidate.interface for candidate in addresses.candidates)
    return f"it has {', '.join(names)}" if names else "it has no usable interface"
