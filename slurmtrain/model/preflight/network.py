"""What the proof of the networks says of each node, in words and as evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from slurmtrain.model.run.events.agent import NetworkElected

_CHECK = "network"
_NAMED = 4

Hosts = Mapping[int, str]


def judge_networks(
    tried: Sequence[ProbedNetwork],
    elected: int | None,
    places: Mapping[int, NodeAddresses],
    *,
    pinned: str | None,
    level: str,
    hosts: Hosts,
) -> dict[int, Finding]:
    """A finding for each node: whether it has a network that reaches all others, and whether that is the best it has.

    Of a single pair that is apart nobody can say which one is at fault: both fail, with ``ambiguous`` as evidence.
    """
    failed = _failures(tried, elected, places, pinned, hosts)
    warned = {} if elected is None else _warnings(tried, elected, hosts)
    passed = "" if elected is None else _described(tried[elected])
    found = {}
    for node in places:
        if node in failed:
            summary, election_record = failed[node]
            found[node] = Finding(_CHECK, "fail", summary, election_record)
        elif node in warned:
            found[node] = Finding(_CHECK, "warn", f"{passed}; {warned[node]}")
        else:
            found[node] = Finding(_CHECK, "pass", passed or "it can be reached, but not all others")
    return {node: apply_level(finding, level) for node, finding in found.items()}


def election_record(
    tried: Sequence[ProbedNetwork], elected: int | None, excluded: Iterable[ExcludedAddress], hosts: Hosts, tests: int
) -> NetworkElected:
    """The election as it is journaled: every network that was looked at, and why it was taken or not."""
    return NetworkElected(
        networks=[
            {
                "name": one.network.name,
                "family": one.network.family,
                "interfaces": {hosts[node]: member.interface for node, member in one.network.members.items()},
                "addresses": {hosts[node]: member.address for node, member in one.network.members.items()},
                "kind": one.network.kind,
                "speed_mbps": one.network.speed_mbps,
                "mtu": one.network.mtu,
                "measured_mb_per_s": None if one.rate is None else round(one.rate / 1e6, 1),
                "pinned": one.network.pinned,
                "proved": one.proved,
                "problems": [describe_problem(problem, hosts) for problem in one.problems],
            }
            for one in tried
        ],
        excluded=[
            {"host": hosts[one.node], "interface": one.interface, "address": one.address, "why": one.why}
            for one in excluded
        ],
        elected=elected,
        tests=tests,
    )


def describe_problem(problem: NetworkProblem, hosts: Hosts) -> str:
    """What one node could not do."""
    return f"{hosts[problem.source]} cannot reach {hosts[problem.target]}: {problem.why}"


def _failures(
    tried: Sequence[ProbedNetwork],
    elected: int | None,
    places: Mapping[int, NodeAddresses],
    pinned: str | None,
    hosts: Hosts,
) -> dict[int, tuple[str, dict[str, Any]]]:
    """Summary and evidence for the nodes that fail."""
    if elected is not None and (pinned is None or tried[elected].network.pinned):
        return {}
    without = nodes_without_interface(places, pinned) if pinned is not None else []
    if without:
        missing = f"{pinned} (network.interface) is not there, or down"
        return {node: (f"{missing}; {_has(places[node])}", {}) for node in without}
    asked = [one for one in tried if one.network.pinned] if pinned is not None else tried
    if not asked:
        said = "; ".join(f"{hosts[node]}: {_has(place)}" for node, place in list(places.items())[:_NAMED])
        return dict.fromkeys(places, (f"the nodes have no network in common ({said})", {"ambiguous": True}))
    return _apart(asked, places, hosts)


def _apart(
    tried: Sequence[ProbedNetwork], places: Mapping[int, NodeAddresses], hosts: Hosts
) -> dict[int, tuple[str, dict[str, Any]]]:
    """The nodes at fault, where none of these networks connects all."""
    everywhere = [set(culprits(one.problems, len(places))) for one in tried]
    guilty = set.intersection(*everywhere) if everywhere else set()
    if guilty:
        return {node: (_apart_in_words(node, tried[0], hosts), {}) for node in guilty}
    involved = {node for one in tried for problem in one.problems for node in (problem.source, problem.target)}
    said = "; ".join(describe_problem(problem, hosts) for problem in tried[0].problems[:2])
    return dict.fromkeys(sorted(involved), (said, {"ambiguous": True}))


def _apart_in_words(node: int, one: ProbedNetwork, hosts: Hosts) -> str:
    theirs = [problem for problem in one.problems if node in (problem.source, problem.target)]
    others = sorted({other for problem in theirs for other in (problem.source, problem.target)} - {node})
    names = ", ".join(hosts[other] for other in others[:_NAMED]) + (" and others" if len(others) > _NAMED else "")
    return f"apart from {names} on {one.network.name}: {describe_problem(theirs[0], hosts)}"


def _warnings(tried: Sequence[ProbedNetwork], elected: int, hosts: Hosts) -> dict[int, str]:
    """What keeps a better network from being used, for the nodes that are at fault, or for all who are involved."""
    said: dict[int, str] = {}
    for one in better_unproved_networks(tried, elected):
        nodes = len(one.network.members)
        involved = {node for problem in one.problems for node in (problem.source, problem.target)}
        for node in culprits(one.problems, nodes) or sorted(involved):
            said.setdefault(node, f"{_described(one)} would be better, but {_apart_in_words(node, one, hosts)}")
    return said


def _described(one: ProbedNetwork) -> str:
    names = sorted(set(one.network.interfaces.values()))
    speed = one.network.speed_mbps
    fast = f", {speed / 1000:g} Gbit/s" if speed else ""
    return f"{'/'.join(names[:_NAMED])} on {one.network.name}{fast}"


def _has(place: NodeAddresses) -> str:
    names = dict.fromkeys(one.interface for one in place.candidates)
    return f"it has {', '.join(names)}" if names else "it has no usable interface"
