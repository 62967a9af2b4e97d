"""Node 0's part of the preflight: it gathers what all nodes report, elects, judges, and tells."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.model.preflight import election, network
from slurmtrain.model.preflight.clock import ClockOffset
from slurmtrain.model.preflight.election import (
    Candidate,
    ExcludedAddress,
    Network,
    NetworkProblem,
    NodeAddresses,
    ProbedNetwork,
)
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.preflight.verdict import PreflightReports, Verdict, absence_verdict, judge_bandwidth, judge_nodes
from slurmtrain.model.run.events.agent import NetworkElected
from slurmtrain.runtime.preflight.background import in_background
from slurmtrain.runtime.preflight.connections import ParticipantConnections, PeerLost, ResponseTimeout
from slurmtrain.runtime.preflight.participant import (
    BANDWIDTH_S,
    LOOPBACK,
    MARGIN_S,
    RATE_S,
    Participant,
    PreflightOutcome,
    ProbeTask,
    make_join_report,
    measure_and_probe,
    measure_rates,
    read_outcome,
)  # fmt: skip
from slurmtrain.runtime.preflight.probe import Prober

# How long to wait until all nodes have taken the last words and left.
_DISCONNECT_S = 2.0

Reports = Mapping[int, Mapping[str, Any]]


async def coordinate(party: Participant, secret: bytes, listener: socket.socket | None) -> PreflightOutcome:
    """Run the preflight of an attempt. ``listener``: where the other nodes come to; None where there are none.

    Raises Left when a node is gone.
    """
    lobby, prover = (
        ParticipantConnections(secret, party.nodes, party.now),
        Prober(0, secret, bind_source=party.bind_source),
    )
    signal = None
    try:
        if listener is not None:
            await lobby.listen(listener)
        return await _Coordinator(party, lobby, prover).run(secret)
    except PeerLost as left:
        # What has stopped one node is told to all.
        signal = left.signal
        raise
    finally:
        await prover.close()
        await lobby.close(party.stopped() or signal)


class _Coordinator:
    def __init__(self, party: Participant, lobby: ParticipantConnections, prover: Prober) -> None:
        self._party = party
        self._lobby = lobby
        self._prover = prover
        self._hosts = {**{node: f"node {node}" for node in range(party.nodes)}, **party.expected_hosts}
        self._known = set(party.expected_hosts)
        self._places: dict[int, NodeAddresses] = {}
        self._excluded: list[ExcludedAddress] = []
        self._tests = 0

    async def run(self, secret: bytes) -> PreflightOutcome:
        try:
            task, reports = await self._collect(secret.hex())
        except ResponseTimeout as late:
            return await self._end(
                absence_verdict(late.nodes, self._hosts, "its agent has not reported in time"), {}, {}, None
            )
        tried = await self._rated(self._tried(task.networks, reports), task)
        seen = self._seen(reports, tried)
        members = self._members(tried)
        verdict, listener = self._meeting_place(judge_nodes(seen, self._party.spec), members)
        if listener is not None and self._party.spec.preflight.bandwidth.level != "off":
            verdict = verdict.adding(await self._bandwidth(members))
        told = network.election_record(tried, seen.elected, self._excluded, self._hosts, self._tests) if tried else None
        return await self._end(verdict, members, _clock_records(seen), listener, told)

    async def _collect(self, secret: str) -> tuple[ProbeTask, Reports]:
        """Let all nodes come, say what is to be done, and gather what they report. Raises Late."""
        party, lobby = self._party, self._lobby
        own, _ = await asyncio.gather(make_join_report(party, self._prover, None), in_background(party.warm_up))
        joined = await lobby.gather("join", own, party.join_s)
        for node, said in joined.items():
            self._hosts[node] = said["host"]
            self._known.add(node)
            self._places[node] = NodeAddresses(
                [Candidate(**one) for one in said["candidates"]], said["via"], said["home"]
            )
            self._excluded += [ExcludedAddress(**one) for one in said["excluded"]]
        ports = {node: int(said["port"]) for node, said in joined.items()}
        # Whoever hears of the token learns nothing of the secret.
        token = hashlib.sha256(f"token of {secret}".encode()).hexdigest()
        task = ProbeTask(self._networks(), ports, token)
        told = task.to_dict(party.nodes)
        await lobby.tell_each("next", {node: {"do": "work", "task": plain} for node, plain in told.items()})
        report = {**await measure_and_probe(party, self._prover, task), "clock": None}
        return task, await lobby.gather("work", report, party.spec.preflight.timeout_s + MARGIN_S)

    def _networks(self) -> list[Network]:
        if not self._party.needs_network:
            return []
        wanted = self._party.spec.network.interface
        found, shared = election.candidate_networks(self._places, None if wanted == "auto" else wanted)
        self._excluded += shared
        return found

    def _tried(self, networks: Sequence[Network], reports: Reports) -> list[ProbedNetwork]:
        self._tests = sum(int(said["tests"]) for said in reports.values())
        return [
            ProbedNetwork(one, [NetworkProblem(source=node, target=target, why=why)
                        for node, said in reports.items() for target, why in said["problems"][index]])
            for index, one in enumerate(networks)
        ]  # fmt: skip

    async def _rated(self, tried: Sequence[ProbedNetwork], task: ProbeTask) -> list[ProbedNetwork]:
        """The same networks, with measured rates where nothing else tells them apart."""
        unclear = election.networks_to_rate(tried)
        if not unclear:
            return list(tried)
        await self._lobby.tell("next", {"do": "rate", "networks": unclear})
        own = await measure_rates(self._party, self._prover, task, unclear)
        with contextlib.suppress(ResponseTimeout):
            said = await self._lobby.gather("rate", own, RATE_S * len(unclear) + MARGIN_S)
            rates = {index: min(rates[i] or 0.0 for rates in said.values()) for i, index in enumerate(unclear)}
            return [replace(one, rate=rates.get(index)) for index, one in enumerate(tried)]
        return list(tried)

    def _seen(self, reports: Reports, tried: Sequence[ProbedNetwork]) -> PreflightReports:
        offsets = {node: ClockOffset(**said["clock"]) if said["clock"] else None for node, said in reports.items()}
        if self._party.nodes > 1:
            offsets[0] = ClockOffset(0.0, 0.0, 0)
        return PreflightReports(
            hosts=self._hosts,
            places=self._places,
            facts={node: said["facts"] for node, said in reports.items()},
            offsets=offsets,
            disciplines={node: said["discipline"] for node, said in reports.items()},
            tried=tried if self._party.needs_network else None,
            elected=election.elect(tried),
        )

    def _members(self, tried: Sequence[ProbedNetwork]) -> Mapping[int, Candidate]:
        """Where each node is to be, were all well; an unproved network is better than none if the spec only warns."""
        if not self._party.needs_network:
            return dict.fromkeys(range(self._party.nodes), LOOPBACK)
        elected = election.elect(tried)
        if elected is None and self._party.spec.preflight.network.level != "fail":
            elected = election.elect([replace(one, problems=()) for one in tried])
        return {} if elected is None else tried[elected].network.members

    def _meeting_place(
        self, verdict: Verdict, members: Mapping[int, Candidate]
    ) -> tuple[Verdict, socket.socket | None]:
        """Bind the port that training meets at, unless it will not."""
        if verdict.problem is not None:
            return verdict, None
        level = self._party.spec.preflight.port.level
        try:
            if not members:
                raise LaunchError("the nodes have no network in common")
            listener = self._party.listen(members[0].address)
        except LaunchError as error:
            return verdict.adding({0: Finding("port", "fail", str(error), {"ambiguous": True})}), None
        said = f"port {listener.getsockname()[1]} on {members[0].address}"
        return verdict.adding({0: Finding("port", "pass", said)} if level != "off" else {}), listener

    async def _bandwidth(self, members: Mapping[int, Candidate]) -> dict[int, Finding]:
        """Have all nodes reduce together, over the elected network, at a port of its own."""
        address = members[0].address
        try:
            # Outside the range that others are given ports from: it is taken again only once ranks have torch.
            with self._party.listen(address) as probe:
                port = int(probe.getsockname()[1])
        except LaunchError as error:
            return judge_bandwidth({0: {"error": str(error)}}, self._party.spec)
        words = {
            node: {"do": "bandwidth", "address": address, "port": port, "interface": member.interface}
            for node, member in members.items()
        }
        await self._lobby.tell_each("next", words)
        own = await in_background(self._party.bandwidth, address, port, members[0].interface)
        try:
            facts = await self._lobby.gather("bandwidth", own, BANDWIDTH_S)
        except ResponseTimeout as late:
            late_by = f"the all-reduce has not ended within {BANDWIDTH_S:.0f} s"
            facts = {node: {"error": late_by} for node in late.nodes}
        return judge_bandwidth(facts, self._party.spec)

    async def _end(
        self,
        verdict: Verdict,
        members: Mapping[int, Candidate],
        clocks: Mapping[int, Mapping[str, Any]],
        listener: socket.socket | None,
        told: NetworkElected | None = None,
    ) -> PreflightOutcome:
        """Tell each node what concerns it."""
        master = [members[0].address, listener.getsockname()[1]] if listener is not None else None
        # A node that never said its name cannot be left out by it.
        blamed = [self._hosts[node] for node in verdict.blamed if node in self._known]
        problem = verdict.problem
        words = {
            node: {
                "do": "end",
                "findings": [one.to_dict() for one in verdict.findings.get(node, ())],
                "blamed": blamed,
                "problem": problem,
                "master": master,
                "address": members[node].address if members else "",
                "interface": members[node].interface if members else "",
                "clock": clocks.get(node, {}),
            }
            for node in range(self._party.nodes)
        }
        await self._lobby.tell_each("next", words)
        await self._lobby.part(_DISCONNECT_S)
        sent, tests = self._lobby.sent, self._prover.made
        return replace(read_outcome(words[0]), election=told, listener=listener, sent=sent, tests=tests)


def _clock_records(seen: PreflightReports) -> dict[int, dict[str, Any]]:
    """What is journaled of each node's clock."""
    told = {}
    for node, said in seen.disciplines.items():
        offset = seen.offsets.get(node)
        told[node] = {
            "offset_ms": None if offset is None else round(offset.offset_s * 1e3, 6),
            "bound_ms": None if offset is None else round(offset.bound_s * 1e3, 6),
            "samples": 0 if offset is None else offset.samples,
            "disciplined": said.get("disciplined"),
            "source": said.get("source", "none"),
        }
    return told
