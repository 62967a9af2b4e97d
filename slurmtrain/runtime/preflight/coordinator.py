"""Node 0's part of a preflight: it collects every node's reports, elects a network, judges, and ends the preflight.

=====  ==========================================  =============================================================
Round  All nodes                                   Node 0, when all have reported
=====  ==========================================  =============================================================
1      ``join``: host, candidate addresses, and    guesses which are on a network, and sends each node the ones
       the port that answers its probes            it is to probe (command ``measure``)
2      compare clocks with node 0, then measure    elects a network; if several are alike, it has their rates
       and probe side by side (``measure``)        measured first (command ``rate``)
3      ``rate``: bytes a second, if requested      judges every check, and binds the ports of training and of the agents
4      ``bandwidth``: an all-reduce over the       judges it
       elected network, if the spec asks for it
5                                                  command ``end``: findings, blamed hosts, address and ports
=====  ==========================================  =============================================================

Node 0 takes part in every round itself. Decisions are pure functions of :mod:`slurmtrain.model.preflight`.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.model.preflight import election
from slurmtrain.model.preflight.checks import Finding
from slurmtrain.model.preflight.clock import ClockOffset, clock_record
from slurmtrain.model.preflight.election import (
    Candidate,
    ExcludedAddress,
    Network,
    NetworkProblem,
    NodeAddresses,
)
from slurmtrain.model.preflight.verdict import (
    PreflightReports,
    Verdict,
    absence_verdict,
    election_record,
    judge_bandwidth,
    judge_nodes,
)
from slurmtrain.runtime.preflight.connections import ParticipantConnections, PeerLost, ResponseTimeout
from slurmtrain.runtime.preflight.participant import (
    BANDWIDTH_S,
    LOOPBACK,
    MARGIN_S,
    RATE_S,
    Participant,
    PreflightOutcome,
    Prober,
    ProbeTask,
    in_background,
    make_join_report,
    measure_and_probe,
    measure_rates,
    read_outcome,
)

# How long to wait for all nodes to receive the last command and disconnect.
_DISCONNECT_S = 2.0

# Reports of a round, by node.
_Reports = Mapping[int, Mapping[str, Any]]


async def coordinate(participant: Participant, secret: bytes, listener: socket.socket | None) -> PreflightOutcome:
    """Run the preflight of an attempt, as node 0.

    Args:
        participant: Node 0 itself.
        secret: The attempt's secret.
        listener: The socket that the other nodes connect to; None if there are none.

    Returns:
        Node 0's own outcome.

    Raises:
        PeerLost: A node is lost.
    """
    connections = ParticipantConnections(secret, participant.nodes, participant.now, participant.refusals)
    prober = participant.prober(secret)
    signal = None
    try:
        if listener is not None:
            await connections.listen(listener)
        outcome = await _Coordinator(participant, connections, prober).run(secret)
        return replace(outcome, secret=secret)
    except PeerLost as lost:
        # Passed on to all nodes: a job that is stopped is stopped on every node, though some learn of it late.
        signal = lost.signal
        raise
    finally:
        await prober.close()
        await connections.close(participant.stopped() or signal)


class _Coordinator:
    """The rounds of one preflight."""

    def __init__(self, participant: Participant, connections: ParticipantConnections, prober: Prober) -> None:
        self._participant = participant
        self._connections = connections
        self._prober = prober
        self._hosts = {**{node: f"node {node}" for node in range(participant.nodes)}, **participant.expected_hosts}
        # Nodes whose host's real name is known, from Slurm or from themselves.
        self._named = set(participant.expected_hosts)
        self._addresses: dict[int, NodeAddresses] = {}
        self._excluded: list[ExcludedAddress] = []

    async def run(self, secret: bytes) -> PreflightOutcome:
        """Run all rounds. Raises PeerLost."""
        participant = self._participant
        try:
            task = await self._collect_joins(secret)
            tasks = task.to_dict(participant.nodes)
            await self._connections.send_each(
                "command", {node: {"do": "measure", "task": of_node} for node, of_node in tasks.items()}
            )
            own_report = {**await measure_and_probe(participant, self._prober, task), "clock": None}
            reports = await self._connections.gather(
                "measure", own_report, participant.spec.preflight.timeout_s + MARGIN_S
            )
        except ResponseTimeout as timeout:
            verdict = absence_verdict(timeout.nodes, self._hosts, "its agent has not reported in time")
            return await self._end(verdict, {}, {}, ())
        probed = await self._probed_networks(task, reports)
        offsets = {
            node: ClockOffset(**report["clock"]) if report["clock"] else None for node, report in reports.items()
        }
        if participant.nodes > 1:
            offsets[0] = ClockOffset(0.0, 0.0, 0)
        merged = PreflightReports(
            hosts=self._hosts,
            addresses=self._addresses,
            facts={node: report["facts"] for node, report in reports.items()},
            offsets=offsets,
            disciplines={node: report["discipline"] for node, report in reports.items()},
            probed=probed if participant.needs_network else None,
            elected=election.elect(probed),
        )
        # Without a network in common, there are none; an unproved one is better than none if the spec only warns.
        members: Mapping[int, Candidate] = dict.fromkeys(range(participant.nodes), LOOPBACK)
        if participant.needs_network:
            chosen = merged.elected
            if chosen is None and participant.spec.preflight.network.level != "fail":
                chosen = election.elect([replace(network, problems=()) for network in probed])
            members = {} if chosen is None else probed[chosen].members
        verdict, listeners = self._bind_ports(judge_nodes(merged, participant.spec), members)
        if listeners and participant.spec.preflight.bandwidth.level != "off":
            verdict = verdict.adding(await self._measure_bandwidth(members))
        clocks = {node: clock_record(offsets[node], discipline) for node, discipline in merged.disciplines.items()}
        outcome = await self._end(verdict, members, clocks, listeners)
        if not probed:
            return outcome
        tests = sum(int(report["tests"]) for report in reports.values())
        record = election_record(probed, merged.elected, self._excluded, self._hosts, tests)
        return replace(outcome, election=record)

    async def _collect_joins(self, secret: bytes) -> ProbeTask:
        """Wait until all nodes have joined, and choose the networks to probe. Raises ResponseTimeout."""
        own_report = await make_join_report(self._participant, self._prober, None)
        joined = await self._connections.gather("join", own_report, self._participant.join_s)
        for node, report in joined.items():
            self._hosts[node] = report["host"]
            self._named.add(node)
            self._addresses[node] = NodeAddresses(
                [Candidate(**candidate) for candidate in report["candidates"]],
                report["own_address"],
                report["coordinator_address"],
            )
            self._excluded += [ExcludedAddress(**address) for address in report["excluded"]]
        ports = {node: int(report["port"]) for node, report in joined.items()}
        # The token ends up in the name of a file in the run directory, so it must reveal nothing about the secret.
        token = hashlib.sha256(f"token of {secret.hex()}".encode()).hexdigest()
        if not self._participant.needs_network:
            return ProbeTask([], ports, token)
        interface = self._participant.spec.network.interface
        networks, shared = election.candidate_networks(self._addresses, None if interface == "auto" else interface)
        self._excluded += shared
        return ProbeTask(networks, ports, token)

    async def _probed_networks(self, task: ProbeTask, reports: _Reports) -> list[Network]:
        """The networks with the problems that nodes had on each, and measured rates if these have to decide."""
        probed = [
            replace(
                network,
                problems=[
                    NetworkProblem(source=node, target=target, reason=reason)
                    for node, report in reports.items()
                    for target, reason in report["problems"][index]
                ],
            )
            for index, network in enumerate(task.networks)
        ]
        indices = election.networks_to_rate(probed)
        if not indices:
            return probed
        await self._connections.broadcast("command", {"do": "rate", "networks": indices})
        own_rates = await measure_rates(self._participant, self._prober, task, indices)
        # Without rates the election falls back to the MTU and the names: no reason to fail.
        with contextlib.suppress(ResponseTimeout):
            reports = await self._connections.gather("rate", own_rates, RATE_S * len(indices) + MARGIN_S)
            # A network is as fast as its slowest link.
            rates = {
                index: min(of_node[position] or 0.0 for of_node in reports.values())
                for position, index in enumerate(indices)
            }
            return [replace(network, rate=rates.get(index)) for index, network in enumerate(probed)]
        return probed

    def _bind_ports(
        self, verdict: Verdict, members: Mapping[int, Candidate]
    ) -> tuple[Verdict, Sequence[socket.socket]]:
        """Keep a port free for rank 0, and listen at the agents' port, unless training will not start."""
        if verdict.problem is not None:
            return verdict, ()
        level = self._participant.spec.preflight.port.level
        listeners: list[socket.socket] = []
        try:
            if not members:
                raise LaunchError("the nodes have no network in common")
            listeners.append(self._participant.reserve())
            # A single node has no agents to connect.
            if self._participant.nodes > 1:
                listeners.append(self._participant.listen(members[0].address))
        except LaunchError as error:
            for listener in listeners:
                listener.close()
            # Ambiguous: taken ports are not the node's fault. A failure whatever the level: training needs a port.
            return verdict.adding({0: Finding("port", "fail", str(error), {"ambiguous": True})}), ()
        summary = f"port {listeners[0].getsockname()[1]} on {members[0].address}"
        return verdict.adding({0: Finding("port", "pass", summary)} if level != "off" else {}), listeners

    async def _measure_bandwidth(self, members: Mapping[int, Candidate]) -> dict[int, Finding]:
        """Have all nodes run an all-reduce over the elected network; its store uses a separate port."""
        address = members[0].address
        try:
            # Released at once: the child process on node 0 binds it again. No other process is assigned it in between,
            # since it is outside the kernel's ephemeral range.
            with self._participant.listen(address) as reserved:
                port = int(reserved.getsockname()[1])
        except LaunchError as error:
            return judge_bandwidth({0: {"error": str(error)}}, self._participant.spec)
        commands = {
            node: {"do": "bandwidth", "address": address, "port": port, "interface": member.interface}
            for node, member in members.items()
        }
        await self._connections.send_each("command", commands)
        own_facts = await in_background(self._participant.bandwidth, address, port, members[0].interface)
        try:
            facts = await self._connections.gather("bandwidth", own_facts, BANDWIDTH_S)
        except ResponseTimeout as timeout:
            problem = f"the all-reduce has not ended within {BANDWIDTH_S:.0f} s"
            facts = {node: {"error": problem} for node in timeout.nodes}
        return judge_bandwidth(facts, self._participant.spec)

    async def _end(
        self,
        verdict: Verdict,
        members: Mapping[int, Candidate],
        clocks: Mapping[int, Mapping[str, Any]],
        listeners: Sequence[socket.socket],
    ) -> PreflightOutcome:
        """Send each node its last command, and wait until all have disconnected.

        ``members`` and ``clocks`` are by node: addresses for training, and what is journaled of clocks. ``listeners``:
        the sockets bound to the port of rank 0 and, with several nodes, to the agents' port.
        """
        if verdict.problem is None:
            await in_background(self._participant.finish)
        ports = [listener.getsockname()[1] for listener in listeners]
        shared = {
            "do": "end",
            # A node cannot be excluded by name if its name is unknown.
            "blamed": [self._hosts[node] for node in verdict.blamed if node in self._named],
            "problem": verdict.problem,
            "master": [members[0].address, ports[0]] if ports else None,
            "control_port": ports[1] if len(ports) > 1 else None,
        }
        commands = {
            node: {
                **shared,
                "findings": [finding.to_dict() for finding in verdict.findings.get(node, ())],
                "address": members[node].address if members else "",
                "interface": members[node].interface if members else "",
                "clock": clocks.get(node, {}),
            }
            for node in range(self._participant.nodes)
        }
        await self._connections.send_each("command", commands)
        await self._connections.wait_for_disconnects(_DISCONNECT_S)
        return replace(
            read_outcome(commands[0]),
            reserved=listeners[0] if listeners else None,
            control_listener=listeners[1] if len(listeners) > 1 else None,
            sent=self._connections.sent,
            tests=self._prober.made,
        )
