"""All findings of an attempt's nodes: whether it may start, why not, and without which nodes it could. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.preflight import checks, clock, network
from slurmtrain.model.preflight.clock import ClockOffset
from slurmtrain.model.preflight.election import NodeAddresses, ProbedNetwork
from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.spec.spec import Spec

_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReports:
    """What the nodes reported, by number. ``elected``: the index of the network, None where there is none.

    ``tried`` is None where no network is needed: one node, or all on one machine.
    """

    hosts: Mapping[int, str]
    places: Mapping[int, NodeAddresses]
    facts: Mapping[int, Mapping[str, Mapping[str, Any]]]
    offsets: Mapping[int, ClockOffset | None]
    disciplines: Mapping[int, Mapping[str, Any]]
    tried: Sequence[ProbedNetwork] | None = None
    elected: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings by node; ``problem``: why no worker may start; ``blamed``: the nodes without which it might go on."""

    findings: Mapping[int, Sequence[Finding]]
    hosts: Mapping[int, str] = field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        """In words, the first few failures; None if there is none."""
        failed: dict[str, list[str]] = {}
        for node, found in self.findings.items():
            for one in found:
                if one.status == "fail":
                    failed.setdefault(f"{one.check}: {one.summary}", []).append(self.hosts[node])
        told = [f"{', '.join(hosts[:_TOLD])}{' ...' if len(hosts) > _TOLD else ''}: {said}"
                for said, hosts in list(failed.items())[:_TOLD]]  # fmt: skip
        more = f"; and {len(failed) - _TOLD} more" if len(failed) > _TOLD else ""
        return "; ".join(told) + more if failed else None

    @property
    def blamed(self) -> list[int]:
        return sorted(checks.blamed_nodes(self.findings))

    def adding(self, more: Mapping[int, Finding]) -> Verdict:
        """The verdict with one finding more of some nodes."""
        added = {node: [*found, *([more[node]] if node in more else [])] for node, found in self.findings.items()}
        return Verdict(added, self.hosts)


def judge_nodes(seen: PreflightReports, spec: Spec) -> Verdict:
    """Every check's findings: the clock and the network first."""
    found: dict[int, list[Finding]] = {node: [] for node in seen.facts}
    preflight = spec.preflight
    if preflight.clock.level != "off":
        for node, one in clock.judge_clocks(seen.offsets, seen.disciplines, preflight.clock, seen.hosts).items():
            found[node].append(one)
    if seen.tried is None:
        for node in found:
            found[node].append(Finding("network", "skip", "one machine: there is nothing to prove"))
    else:
        pinned = None if spec.network.interface == "auto" else spec.network.interface
        level = preflight.network.level
        judged = network.judge_networks(
            seen.tried, seen.elected, seen.places, pinned=pinned, level=level, hosts=seen.hosts
        )
        for node, one in judged.items():
            found[node].append(one)
    for node, rest in checks.judge_checks(seen.facts, spec, seen.hosts).items():
        found[node] += rest
    return Verdict(found, seen.hosts)


def absence_verdict(nodes: Sequence[int], hosts: Mapping[int, str], why: str) -> Verdict:
    """The verdict when some nodes have not done their part: nothing is known but that."""
    return Verdict({node: [Finding("agent", "fail", why)] if node in nodes else [] for node in hosts}, hosts)


def judge_bandwidth(facts: Mapping[int, Mapping[str, Any]], spec: Spec) -> dict[int, Finding]:
    """The all-reduce of all ranks: one figure, so that nobody alone is to blame for it."""
    limits = spec.preflight.bandwidth
    found = {}
    for node, said in facts.items():
        if "skip" in said or "error" in said:
            status = "skip" if "skip" in said else "fail"
            found[node] = Finding("bandwidth", status, str(said.get("skip") or said["error"]), {"ambiguous": True})
            continue
        bus, least = said["busbw_gb_s"], limits.min_gb_per_s
        summary = f"{bus:.3g} GB/s of bus bandwidth, {said['algbw_gb_s']:.3g} GB/s of an all-reduce"
        low = least is not None and bus < least
        summary += f" (limit {least:g} GB/s)" if low else ""
        found[node] = Finding("bandwidth", "fail" if low else "pass", summary, {**said, "ambiguous": True})
    return {node: apply_level(one, limits.level) for node, one in found.items()}
