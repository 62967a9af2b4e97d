"""What the probes of the networks mean for each node, as findings and as a record of the election. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.preflight.election import (
    ExcludedAddress,
    NetworkProblem,
    NodeAddresses,
    ProbedNetwork,
    better_unproved_networks,
    culprits,
    nodes_without_interface,
)
from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.run.events.agent_events import NetworkElected

_CHECK = "network"
_MAX_NAMED = 4

Hosts = Mapping[int, str]
# Summary and evidence of a failure.
_Failure = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionResult:
    """All that is known about an election.

    Attributes:
        probed: The candidate networks, after their probes.
        elected: The index of the elected one; None if none is proved.
        addresses: Each node's addresses, by node.
        hosts: The names of the nodes.
        pinned: The interface that the spec names; None for any.
    """

    probed: Sequence[ProbedNetwork]
    elected: int | None
    addresses: Mapping[int, NodeAddresses]
    hosts: Hosts
    pinned: str | None = None


def judge_networks(result: ElectionResult, level: str) -> dict[int, Finding]:
    """A finding for each node: whether it has a network that reaches all others, and whether that is the best it has.

    If a single pair cannot connect, either of the two may be at fault: both fail, with ``ambiguous`` as
    evidence. ``level`` is the spec's: fail or warn.
    """
    failed = _failures(result)
    elected = None if result.elected is None else result.probed[result.elected]
    warned = {} if result.elected is None else _warnings(result.probed, result.elected, result.hosts)
    passed = "" if elected is None else _describe_network(elected)
    findings = {}
    for node in result.addresses:
        if node in failed:
            summary, evidence = failed[node]
            findings[node] = Finding(_CHECK, "fail", summary, evidence)
        elif node in warned:
            findings[node] = Finding(_CHECK, "warn", f"{passed}; {warned[node]}")
        else:
            # Nothing is elected because of other nodes, which have failed.
            findings[node] = Finding(_CHECK, "pass", passed or "it can be reached, but not all others can")
    return {node: apply_level(finding, level) for node, finding in findings.items()}


def election_record(
    probed: Sequence[ProbedNetwork],
    elected: int | None,
    excluded: Iterable[ExcludedAddress],
    hosts: Hosts,
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
    return NetworkElected(
        networks=[_network_record(candidate, hosts) for candidate in probed],
        excluded=[
            {
                "host": hosts[address.node],
                "interface": address.interface,
                "address": address.address,
                "why": address.reason,
            }
            for address in excluded
        ],
        elected=elected,
        tests=tests,
    )


def _network_record(candidate: ProbedNetwork, hosts: Hosts) -> dict[str, Any]:
    network = candidate.network
    return {
        "name": network.name,
        "family": network.family,
        "interfaces": {hosts[node]: member.interface for node, member in network.members.items()},
        "addresses": {hosts[node]: member.address for node, member in network.members.items()},
        "kind": network.kind,
        "speed_mbps": network.speed_mbps,
        "mtu": network.mtu,
        "measured_mb_per_s": None if candidate.rate is None else round(candidate.rate / 1e6, 1),
        "pinned": network.pinned,
        "proved": candidate.proved,
        "problems": [describe_problem(problem, hosts) for problem in candidate.problems],
    }


def describe_problem(problem: NetworkProblem, hosts: Hosts) -> str:
    """A problem as a phrase: which node cannot reach which, and why."""
    return f"{hosts[problem.source]} cannot reach {hosts[problem.target]}: {problem.reason}"


def _failures(result: ElectionResult) -> dict[int, _Failure]:
    """The failures of the nodes that fail."""
    pinned, addresses, hosts = result.pinned, result.addresses, result.hosts
    if result.elected is not None and (pinned is None or result.probed[result.elected].network.pinned):
        return {}
    # Most specific first: nodes that lack the interface explain everything that follows from it.
    lacking = nodes_without_interface(addresses, pinned) if pinned is not None else []
    if lacking:
        missing = f"{pinned} (network.interface) is not there, or down"
        return {node: (f"{missing}; {_describe_interfaces(addresses[node])}", {}) for node in lacking}
    acceptable = [network for network in result.probed if network.network.pinned] if pinned else result.probed
    if not acceptable:
        interfaces = "; ".join(
            f"{hosts[node]}: {_describe_interfaces(own)}" for node, own in list(addresses.items())[:_MAX_NAMED]
        )
        summary = f"the nodes have no network in common ({interfaces})"
        return dict.fromkeys(addresses, (summary, {"ambiguous": True}))
    return _unreachable_nodes(acceptable, len(addresses), hosts)


def _unreachable_nodes(probed: Sequence[ProbedNetwork], nodes: int, hosts: Hosts) -> dict[int, _Failure]:
    """The failures if none of these networks connects all nodes."""
    culprits_by_network = [set(culprits(network.problems, nodes)) for network in probed]
    # Only a node that is cut off on every network keeps all others from training.
    common = set.intersection(*culprits_by_network) if culprits_by_network else set()
    if common:
        return {node: (_describe_culprit(node, probed[0], hosts), {}) for node in common}
    involved = {node for network in probed for node in _involved_nodes(network)}
    # The first two problems are usually both directions of one pair.
    summary = "; ".join(describe_problem(problem, hosts) for problem in probed[0].problems[:2])
    return dict.fromkeys(sorted(involved), (summary, {"ambiguous": True}))


def _involved_nodes(network: ProbedNetwork) -> set[int]:
    return {node for problem in network.problems for node in (problem.source, problem.target)}


def _describe_culprit(node: int, network: ProbedNetwork, hosts: Hosts) -> str:
    own_problems = [problem for problem in network.problems if node in (problem.source, problem.target)]
    others = sorted({other for problem in own_problems for other in (problem.source, problem.target)} - {node})
    names = ", ".join(hosts[other] for other in others[:_MAX_NAMED])
    names += " and others" if len(others) > _MAX_NAMED else ""
    return f"apart from {names} on {network.network.name}: {describe_problem(own_problems[0], hosts)}"


def _warnings(probed: Sequence[ProbedNetwork], elected: int, hosts: Hosts) -> dict[int, str]:
    """What keeps a better network from being used, for the nodes that are at fault, or for all nodes involved."""
    warnings: dict[int, str] = {}
    for better in better_unproved_networks(probed, elected):
        at_fault = culprits(better.problems, len(better.network.members)) or sorted(_involved_nodes(better))
        for node in at_fault:
            culprit = _describe_culprit(node, better, hosts)
            # The best of several better networks comes first, and is worth the warning.
            warnings.setdefault(node, f"{_describe_network(better)} would be better, but {culprit}")
    return warnings


def _describe_network(candidate: ProbedNetwork) -> str:
    names = sorted(set(candidate.network.interfaces.values()))
    speed_mbps = candidate.network.speed_mbps
    speed = f", {speed_mbps / 1000:g} Gbit/s" if speed_mbps else ""
    return f"{'/'.join(names[:_MAX_NAMED])} on {candidate.network.name}{speed}"


def _describe_interfaces(addresses: NodeAddresses) -> str:
    names = dict.fromkeys(candidate.interface for candidate in addresses.candidates)
    return f"it has {', '.join(names)}" if names else "it has no usable interface"
