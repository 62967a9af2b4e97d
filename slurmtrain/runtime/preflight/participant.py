"""Preflight: all nodes of an attempt meet, measure, prove their networks, and hear from node 0 whether to go on.

Node 0 has a part of its own beside it: :mod:`slurmtrain.runtime.preflight.coordinator`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slurmtrain.model.preflight.clock import offset_from_stamps
from slurmtrain.model.preflight.election import ALL_PAIRS, Candidate, ExcludedAddress, Network, probe_targets
from slurmtrain.model.preflight.finding import Finding, worst_status
from slurmtrain.model.run.events.agent import NetworkElected
from slurmtrain.model.spec.spec import Spec
from slurmtrain.runtime.preflight.background import in_background
from slurmtrain.runtime.preflight.connections import CoordinatorConnection, Endpoint, connect_to_coordinator
from slurmtrain.runtime.preflight.probe import Prober

# Until all nodes have come: their tasks may start minutes apart where Python lies on a busy filesystem.
JOIN_S = 300.0
# Beside the time that a check may take: until the last report is in.
MARGIN_S = 5.0
# The longest that one node's measuring of a rate may take.
RATE_S = 5.0
# Until the all-reduce has ended on all nodes; libraries begin slowly.
BANDWIDTH_S = 120.0
# Exchanges of the time, of which the one with the least delay counts; fewer where node 0 has many to answer.
_EXCHANGES, _EXCHANGES_OF_MANY = 32, 12
_ANSWER_S = 10.0
# For node 0's next word: it may wait for others, and beats meanwhile.
_PATIENCE_S = 2 * JOIN_S
# What a connection may take longer for each node there is: node 0 answers them all.
_ANSWERING_S = 0.005
LOOPBACK = Candidate(interface="lo", address="127.0.0.1", prefix=8)


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What one agent brings to the meeting.

    ``candidates``, ``measure`` and ``discipline`` look at this machine; ``warm_up`` does what has to be done anyway
    while the others are waited for; ``bandwidth`` reduces with all nodes, given address and port of node 0 and the
    interface here. ``listen`` binds the port that training meets at, on an address of node 0's. ``stopped``: the name
    of the signal that has stopped this node. ``together``: all nodes are on one machine. ``now`` is this node's clock,
    in seconds since 1970. ``bind_source``: connect from the node's own address, whatever the kernel's routes say; for
    trials with many addresses on one machine.
    """

    node: int
    nodes: int
    host: str
    spec: Spec
    candidates: Callable[[], tuple[Sequence[Candidate], Sequence[ExcludedAddress]]]
    measure: Callable[[Sequence[str], str], Mapping[str, Mapping[str, Any]]]
    discipline: Callable[[], Mapping[str, Any]]
    warm_up: Callable[[], None]
    listen: Callable[[str], socket.socket]
    bandwidth: Callable[[str, int, str], Mapping[str, Any]]
    stopped: Callable[[], str | None] = lambda: None
    together: bool = False
    expected_hosts: Mapping[int, str] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    join_s: float = JOIN_S
    bind_source: bool = False

    @property
    def needs_network(self) -> bool:
        return self.nodes > 1 and not self.together


@dataclass(frozen=True, kw_only=True)
class PreflightOutcome:
    """What the preflight came to, for one node.

    ``problem``: why no worker may start. ``blamed``: the hosts without which it might be tried again. ``master``:
    address and port that training meets at; ``address`` and ``interface`` are this node's on the way there.
    ``listener`` and ``election`` are node 0's. ``sent`` and ``tests`` count messages and connections of this node.
    """

    findings: Sequence[Finding]
    blamed: Sequence[str] = ()
    problem: str | None = None
    master: tuple[str, int] | None = None
    address: str = ""
    interface: str = ""
    clock: Mapping[str, Any] = field(default_factory=dict)
    election: NetworkElected | None = None
    listener: socket.socket | None = None
    sent: int = 0
    tests: int = 0

    @property
    def status(self) -> str:
        return worst_status(self.findings)


async def participate(party: Participant, doors: Callable[[], Sequence[Endpoint]]) -> PreflightOutcome:
    """The part of every node but node 0.

    Raises Left when node 0 is gone, Late when it says nothing, LaunchError when it cannot be found.
    """
    warming = asyncio.create_task(in_background(party.warm_up))
    guest, secret = await connect_to_coordinator(doors, party.node, party.join_s, party.now)
    prover = Prober(party.node, secret, bind_source=party.bind_source)
    try:
        await warming
        await guest.report("join", await make_join_report(party, prover, guest.via))
        task = ProbeTask((), {}, "")
        while True:
            words = await guest.hear("next", _PATIENCE_S)
            if words["do"] == "end":
                return replace(read_outcome(words), sent=guest.sent, tests=prover.made)
            if words["do"] == "work":
                task = ProbeTask.from_dict(words["task"])
            await guest.report(words["do"], await _execute(party, guest, prover, task, words))
    finally:
        await prover.close()
        await guest.close(party.stopped())


async def _execute(
    party: Participant, guest: CoordinatorConnection, prover: Prober, task: ProbeTask, words: Mapping[str, Any]
) -> Any:
    """What node 0 asks for."""
    if words["do"] == "work":
        # The clock first: measuring keeps this machine busy, and delays are what makes an offset uncertain.
        clock = await _compare_clocks(party, guest)
        return {**await measure_and_probe(party, prover, task), "clock": clock}
    if words["do"] == "rate":
        return await measure_rates(party, prover, task, words["networks"])
    return await in_background(party.bandwidth, words["address"], words["port"], words["interface"])


def read_outcome(words: Mapping[str, Any]) -> PreflightOutcome:
    """What node 0's last words mean for a node."""
    return PreflightOutcome(
        findings=[Finding(**{"evidence": {}, **one}) for one in words["findings"]],
        blamed=words["blamed"],
        problem=words["problem"],
        master=tuple(words["master"]) if words["master"] else None,
        address=words["address"],
        interface=words["interface"],
        clock=words["clock"],
    )


async def make_join_report(party: Participant, prover: Prober, via: tuple[str, str] | None) -> dict[str, Any]:
    """What a node says of itself when it comes. ``via``: the addresses of this node and of node 0 by which it came."""
    candidates, excluded = ([], []) if not party.needs_network else await in_background(party.candidates)
    return {
        "host": party.host,
        "port": await prover.listen() if party.needs_network else 0,
        "via": via[0] if via else None,
        "home": via[1] if via else None,
        "candidates": [asdict(one) for one in candidates],
        "excluded": [asdict(one) for one in excluded],
    }


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """What a node is to prove: networks in which it knows itself and those it is to try, and where they answer."""

    networks: Sequence[Network]
    ports: Mapping[int, int]
    token: str

    def to_dict(self, nodes: int) -> dict[int, dict[str, Any]]:
        """For each of so many nodes, as JSON has it: no more than it needs, since there may be hundreds."""
        members = [{node: asdict(member) for node, member in one.members.items()} for one in self.networks]
        told = {}
        for node in range(nodes):
            wanted = [node, *probe_targets(node, nodes)] if self.networks else []
            told[node] = {
                "networks": [
                    [one.name, {n: theirs[n] for n in wanted}]
                    for one, theirs in zip(self.networks, members, strict=True)
                ],
                "ports": {n: self.ports[n] for n in wanted},
                "token": self.token,
            }
        return told

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ProbeTask:
        """Read what :meth:`to_dict` gave; JSON has made text of the nodes' numbers."""
        networks = [
            Network(name, {int(node): Candidate(**one) for node, one in members.items()})
            for name, members in plain["networks"]
        ]
        return cls(networks, {int(node): port for node, port in plain["ports"].items()}, plain["token"])


async def measure_and_probe(party: Participant, prover: Prober, task: ProbeTask) -> dict[str, Any]:
    """Measure this machine and prove the networks, at the same time."""
    own = [one.members[party.node].address for one in task.networks]
    measuring = in_background(party.measure, own, task.token)
    discipline = in_background(party.discipline)
    facts, said, problems = await asyncio.gather(measuring, discipline, _prove(party, prover, task))
    return {
        "facts": facts,
        "discipline": said,
        "problems": [[[problem.target, problem.why] for problem in found] for found in problems],
        "tests": prover.made,
    }


async def measure_rates(
    party: Participant, prover: Prober, task: ProbeTask, which: Sequence[int]
) -> list[float | None]:
    """Bytes a second to the next node, over some of the networks, one after the other."""
    target = (party.node + 1) % party.nodes
    return [await prover.rate(task.networks[index], task.ports[target], target, RATE_S) for index in which]


async def _prove(party: Participant, prover: Prober, task: ProbeTask) -> list[list[Any]]:
    limits = party.spec.preflight.network
    if limits.level == "off":
        return [[] for _ in task.networks]
    targets = probe_targets(party.node, party.nodes)
    timeout_s = limits.timeout_s + _ANSWERING_S * party.nodes
    return list(await asyncio.gather(*(prover.prove(one, task.ports, targets, timeout_s) for one in task.networks)))


async def _compare_clocks(party: Participant, guest: CoordinatorConnection) -> dict[str, Any] | None:
    """This node's clock beside node 0's; None where it could not be compared."""
    count = _EXCHANGES if party.nodes <= ALL_PAIRS else _EXCHANGES_OF_MANY
    stamps = [await guest.ask_clock(_ANSWER_S) for _ in range(count)]
    try:
        return asdict(offset_from_stamps(stamps))
    except ValueError:
        return None
