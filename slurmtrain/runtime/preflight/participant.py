"""What every node does in a preflight: report its addresses, measure itself, probe networks, follow node 0's commands.

Node 0 does all of that too, and also coordinates: :mod:`slurmtrain.runtime.preflight.coordinator`. The messages
are listed in :mod:`slurmtrain.runtime.preflight.connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.checks import Finding, worst_status
from slurmtrain.model.preflight.clock import offset_from_stamps
from slurmtrain.model.preflight.election import (
    ALL_PAIRS,
    Candidate,
    ExcludedAddress,
    Network,
    NetworkProblem,
    probe_targets,
)
from slurmtrain.model.run.events.agent_events import NetworkElected
from slurmtrain.runtime.peers.channel import (
    AuthenticationError,
    Channel,
    ChannelClosed,
    PeerListener,
    Refusals,
    connect,
)
from slurmtrain.runtime.preflight.connections import Endpoint, connect_to_coordinator
from slurmtrain.runtime.preflight.ports import listen, listen_anywhere, source_towards

# Until all nodes have joined: their tasks may start minutes apart if Python is on a busy filesystem.
JOIN_S = 300.0
# Added to the time that a check may take, until the last report has arrived.
MARGIN_S = 5.0
# The longest that one node may take to measure a rate.
RATE_S = 5.0
# Until the all-reduce has ended on all nodes: NCCL alone may take tens of seconds to begin.
BANDWIDTH_S = 120.0
# Clock exchanges; the one with the least delay counts. Fewer if node 0 has many nodes to answer.
_EXCHANGES, _EXCHANGES_OF_MANY = 32, 12
_CLOCK_ANSWER_S = 10.0
# Until node 0's next command, which may wait for the slowest node to join; meanwhile, heartbeats show that node 0 is
# alive.
_COMMAND_S = 2 * JOIN_S
# Added to the timeout of a probe for each node of the attempt: all nodes probe node 0, which answers them in turn.
_PROBE_S_PER_NODE = 0.005
_T = TypeVar("_T")
LOOPBACK = Candidate(interface="lo", address="127.0.0.1", prefix=8)


@dataclass(frozen=True, kw_only=True)
class Participant:
    """One node as the preflight needs it: who it is, and functions that look at its machine.

    Passing them in lets a test run 64 nodes as 64 coroutines.

    Attributes:
        node: The node's number; node 0 coordinates.
        nodes: How many nodes the attempt has.
        host: The node's name.
        spec: The run's spec.
        candidates: Lists the addresses that training could use, and addresses that it cannot.
        measure: Measures this machine for all checks, given this node's addresses and the token of the attempt.
        discipline: Returns the service that synchronises this machine's clock.
        reserve: Keeps a port of node 0 free for rank 0, where the ranks meet.
        listen: Listens at a port on an address of node 0.
        bandwidth: Takes part in an all-reduce of all nodes, given node 0's address and port, and this node's interface.
        stopped: The name of the signal that has stopped this node; None while it runs.
        single_machine: Whether all nodes are on one machine, and need no network.
        expected_hosts: The names that Slurm gives the nodes; used for nodes that never report their own.
        now: This node's clock, in seconds since 1970.
        join_s: How long to wait until all nodes have joined.
        bind_source: Probe from the node's own address, whatever the kernel's routes say: for tests with the addresses
            of many nodes on one machine.
        refusals: Counts connections that do not come from nodes of the attempt.
        finish: On node 0, waits for what has to be there before any node passes.
    """

    node: int
    nodes: int
    host: str
    spec: Spec
    candidates: Callable[[], tuple[Sequence[Candidate], Sequence[ExcludedAddress]]]
    measure: Callable[[Sequence[str], str], Mapping[str, Mapping[str, Any]]]
    discipline: Callable[[], Mapping[str, Any]]
    reserve: Callable[[], socket.socket]
    listen: Callable[[str], socket.socket]
    bandwidth: Callable[[str, int, str], Mapping[str, Any]]
    stopped: Callable[[], str | None] = lambda: None
    single_machine: bool = False
    expected_hosts: Mapping[int, str] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    join_s: float = JOIN_S
    bind_source: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    finish: Callable[[], None] = lambda: None

    def prober(self, secret: bytes) -> Prober:
        """What answers the probes of other nodes, which know this ``secret``, and makes this node's own."""
        return Prober(
            self.node, secret, nodes=self.nodes, bind_source=self.bind_source, refusals=self.refusals
        )  # fmt: skip

    @property
    def needs_network(self) -> bool:
        """Whether the nodes train over a network that has to be elected."""
        return self.nodes > 1 and not self.single_machine


@dataclass(frozen=True, kw_only=True)
class PreflightOutcome:
    """The result of a preflight for one node.

    Attributes:
        findings: This node's findings.
        blamed: The hosts without which the attempt could start.
        problem: Why no worker may start; None if they may.
        master: Address and port on node 0 at which the ranks meet; None if no port is reserved.
        control_port: The port, at the same address, where the agents connect while ranks train; None for a single node.
        secret: The secret that they must know for that.
        address: This node's address in the elected network.
        interface: The interface with that address.
        clock: The journal record of this node's clock.
        election: The journal record of the election, on node 0 only.
        reserved: The socket that keeps the port of ``master`` free, on node 0 only.
        control_listener: The socket that is bound to ``control_port``, on node 0 only.
        sent: Messages that this node sent.
        tests: Connections that this node made to probe networks.
    """

    findings: Sequence[Finding]
    blamed: Sequence[str] = ()
    problem: str | None = None
    master: tuple[str, int] | None = None
    control_port: int | None = None
    secret: bytes = field(default=b"", repr=False)
    address: str = ""
    interface: str = ""
    clock: Mapping[str, Any] = field(default_factory=dict)
    election: NetworkElected | None = None
    reserved: socket.socket | None = None
    control_listener: socket.socket | None = None
    sent: int = 0
    tests: int = 0

    @property
    def status(self) -> str:
        """The worst status among the findings."""
        return worst_status(self.findings)


async def participate(participant: Participant, known_endpoints: Callable[[], Sequence[Endpoint]]) -> PreflightOutcome:
    """Take part in a preflight as a node other than node 0, which listens at one of ``known_endpoints``.

    Raises:
        PeerLost: Node 0 is lost.
        ResponseTimeout: Node 0 sends no command.
        LaunchError: Node 0 cannot be found.
    """
    coordinator, secret = await connect_to_coordinator(
        known_endpoints, participant.node, participant.join_s, participant.now
    )
    prober = participant.prober(secret)
    try:
        await coordinator.report("join", await make_join_report(participant, prober, coordinator.route))
        task = ProbeTask((), {}, "")
        while True:
            command = await coordinator.receive("command", _COMMAND_S)
            report: Any
            match command["do"]:
                case "end":
                    return replace(read_outcome(command), secret=secret, sent=coordinator.sent, tests=prober.made)
                case "measure":
                    task = ProbeTask.from_dict(command["task"])
                    # The clock first: measuring keeps this machine busy, and delays make an offset uncertain.
                    count = _EXCHANGES if participant.nodes <= ALL_PAIRS else _EXCHANGES_OF_MANY
                    stamps = [await coordinator.exchange_clock_stamps(_CLOCK_ANSWER_S) for _ in range(count)]
                    clock = None
                    with contextlib.suppress(ValueError):  # the clocks cannot be compared
                        clock = asdict(offset_from_stamps(stamps))
                    report = {**await measure_and_probe(participant, prober, task), "clock": clock}
                case "rate":
                    report = await measure_rates(participant, prober, task, command["networks"])
                case _:
                    where = command["address"], command["port"], command["interface"]
                    report = await in_background(participant.bandwidth, *where)
            await coordinator.report(command["do"], report)
    finally:
        await prober.close()
        await coordinator.close(participant.stopped())


def read_outcome(command: Mapping[str, Any]) -> PreflightOutcome:
    """The outcome that node 0's last command contains."""
    return PreflightOutcome(
        findings=[Finding(**{"evidence": {}, **finding}) for finding in command["findings"]],
        blamed=command["blamed"],
        problem=command["problem"],
        master=tuple(command["master"]) if command["master"] else None,
        control_port=command["control_port"],
        address=command["address"],
        interface=command["interface"],
        clock=command["clock"],
    )


async def make_join_report(participant: Participant, prober: Prober, route: tuple[str, str] | None) -> dict[str, Any]:
    """What a node reports about itself when it joins.

    Args:
        participant: The node.
        prober: Answers the probes of other nodes from now on.
        route: The two ends of its connection to node 0: this node's address and node 0's; None on node 0.
    """
    candidates, excluded = ([], []) if not participant.needs_network else await in_background(participant.candidates)
    return {
        "host": participant.host,
        "port": await prober.listen() if participant.needs_network else 0,
        "own_address": route[0] if route else None,
        "coordinator_address": route[1] if route else None,
        "candidates": [asdict(candidate) for candidate in candidates],
        "excluded": [asdict(address) for address in excluded],
    }


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """What a node must probe.

    Attributes:
        networks: The candidate networks, with at least the node itself and the nodes that it connects to as members.
        ports: Where these nodes answer probes.
        token: Text that only the nodes of this attempt know, for checks that need a shared name.
    """

    networks: Sequence[Network]
    ports: Mapping[int, int]
    token: str

    def to_dict(self, nodes: int) -> dict[int, dict[str, Any]]:
        """The task of each of ``nodes`` nodes as JSON: only what that node needs, since there may be hundreds."""
        # Converted once, since the same member is part of many tasks.
        members = [
            {node: asdict(member) for node, member in network.members.items()} for network in self.networks
        ]  # fmt: skip
        tasks = {}
        for node in range(nodes):
            needed = [node, *probe_targets(node, nodes)] if self.networks else []
            tasks[node] = {
                "networks": [
                    [network.name, {other: network_members[other] for other in needed}]
                    for network, network_members in zip(self.networks, members, strict=True)
                ],
                "ports": {other: self.ports[other] for other in needed},
                "token": self.token,
            }
        return tasks

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ProbeTask:
        """Read what :meth:`to_dict` returned; JSON has turned the nodes' numbers into text."""
        networks = [
            Network(name, {int(node): Candidate(**member) for node, member in members.items()})
            for name, members in plain["networks"]
        ]
        return cls(networks, {int(node): port for node, port in plain["ports"].items()}, plain["token"])


async def measure_and_probe(participant: Participant, prober: Prober, task: ProbeTask) -> dict[str, Any]:
    """Measure this machine and probe the networks, at the same time.

    Args:
        participant: This node.
        prober: Makes its probes.
        task: What to probe.

    Returns:
        The report of the command ``measure``: facts by check, the clock's discipline, and for each network the problems
        as pairs of target and reason.
    """
    limits = participant.spec.preflight.network
    targets = probe_targets(participant.node, participant.nodes) if limits.level != "off" else []
    timeout_s = limits.timeout_s + _PROBE_S_PER_NODE * participant.nodes
    own_addresses = [network.members[participant.node].address for network in task.networks]
    facts, discipline, problems = await asyncio.gather(
        in_background(participant.measure, own_addresses, task.token),
        in_background(participant.discipline),
        asyncio.gather(*(prober.probe(network, task.ports, targets, timeout_s) for network in task.networks)),
    )
    return {
        "facts": facts,
        "discipline": discipline,
        "problems": [[[problem.target, problem.reason] for problem in of_network] for of_network in problems],
        "tests": prober.made,
    }


async def measure_rates(
    participant: Participant, prober: Prober, task: ProbeTask, network_indices: Sequence[int]
) -> list[float | None]:
    """Measure the rate to the next node over some networks, one after the other so that they do not compete.

    Args:
        participant: This node.
        prober: Makes its connections.
        task: Contains the networks.
        network_indices: The networks to measure.

    Returns:
        Bytes a second over each; None if too little got through in time.
    """
    target = (participant.node + 1) % participant.nodes
    return [
        await prober.measure_rate(task.networks[index], task.ports[target], target, RATE_S) for index in network_indices
    ]


async def in_background(function: Callable[..., _T], *args: object) -> _T:
    """Run a function in its own daemon thread, and return its result or raise its exception.

    asyncio.to_thread will not do: the threads of its pool are joined when the loop ends, and again when the interpreter
    exits, so a thread that hangs, for example on a filesystem whose server is down, would keep the agent from acting on
    a signal.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, function(*args))
        except BaseException as error:  # noqa: BLE001 (re-raised where the result is awaited)
            settle = partial(future.set_exception, error)
        # A RuntimeError means that the loop has ended and nothing awaits the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name=f"background-{getattr(function, '__name__', '')}", daemon=True).start()
    return await future


# --- probes of a network ----------------------------------------------------------------------------------------------

# Concurrent probes: each holds a file descriptor, and a process may be limited to 1,024 of them.
_MAX_CONCURRENT = 64
# What is sent to measure the rate between two nodes: batches of messages of one chunk. A slow network shows in half of
# them, for which it has this time.
RATE_BYTES = 2 << 20
_BATCH_BYTES = 1 << 19
_CHUNK_BYTES = 1 << 16
_ENOUGH_S = 0.05


class Prober:
    """Answers the probes of other nodes, and makes this node's own.

    A probe sends ``{"from": node, "pad": text}``; messages of text alone before it are load for measuring a rate, for
    which it may send several on a connection. The answer is ``{"node": number, "you": address, "pad": text}`` with the
    address that the answering node sees.
    """

    def __init__(
        self, node: int, secret: bytes, *, nodes: int = 1, bind_source: bool = False, refusals: Refusals | None = None
    ) -> None:
        """Probe as one node of an attempt.

        Args:
            node: This node's number.
            secret: The attempt's secret.
            nodes: How many nodes the attempt has.
            bind_source: Connect from the node's own address, whatever the kernel's routes say.
            refusals: Counts connections of others.
        """
        self._node = node
        self._nodes = nodes
        self._secret = secret
        self._bind_source = bind_source
        self._refusals = refusals or Refusals()
        self._gate: PeerListener | None = None
        self._limit = asyncio.Semaphore(_MAX_CONCURRENT)
        self.made = 0
        """Connections made."""

    async def listen(self, address: str | None = None) -> int:
        """Answer probes from now on, on all addresses of this node or on one; returns the port."""
        listener = listen_anywhere(0) if address is None else listen(address, 0)
        self._gate = PeerListener(listener, self._secret, self._nodes, self._answer, self._refusals)
        self._gate.open()
        return int(listener.getsockname()[1])

    async def probe(
        self, network: Network, ports: Mapping[int, int], targets: Sequence[int], timeout_s: float
    ) -> list[NetworkProblem]:
        """Connect to some nodes over a network, and return the problems.

        Args:
            network: The network, with the nodes' addresses.
            ports: The port where each node answers.
            targets: The nodes to connect to.
            timeout_s: Seconds for each of them.
        """

        async def probe_node(target: int) -> NetworkProblem | None:
            async with self._limit:
                self.made += 1
                reason = await self._find_problem(network, ports[target], target, timeout_s)
            return None if reason is None else NetworkProblem(source=self._node, target=target, reason=reason)

        results = await asyncio.gather(*map(probe_node, targets))
        return [problem for problem in results if problem is not None]

    async def measure_rate(self, network: Network, port: int, target: int, timeout_s: float) -> float | None:
        """Measure the rate to another node over a network.

        Args:
            network: The network, with the nodes' addresses.
            port: The port where the node answers.
            target: The node.
            timeout_s: Seconds in total.

        Returns:
            Bytes a second, of the batch that was disturbed least; None if the load did not get through in time.
        """
        address = network.members[target].address
        rates: list[float] = []
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.closing(await connect(address, port, self._secret)) as channel:
                    began = time.perf_counter()
                    while len(rates) < RATE_BYTES // _BATCH_BYTES:
                        batch_began = time.perf_counter()
                        for _ in range(_BATCH_BYTES // _CHUNK_BYTES):
                            await channel.send("x" * _CHUNK_BYTES)
                        # What was sent may still be in buffers: only the answer shows that all of it has arrived.
                        await channel.send({"from": self._node, "pad": ""})
                        await channel.receive()
                        rates.append(_BATCH_BYTES / (time.perf_counter() - batch_began))
                        if len(rates) >= RATE_BYTES // _BATCH_BYTES // 2 and time.perf_counter() - began > _ENOUGH_S:
                            break
                    return max(rates)
        except (OSError, AuthenticationError, ChannelClosed):  # a TimeoutError is an OSError
            return None

    async def close(self) -> None:
        """Stop answering probes."""
        if self._gate is not None:
            await self._gate.close()

    async def _find_problem(self, network: Network, port: int, target: int, timeout_s: float) -> str | None:
        """Why training could not reach a node; None if it could."""
        own_address, address = network.members[self._node].address, network.members[target].address
        source = own_address if self._bind_source else source_towards(address)
        if source != own_address:
            return f"the kernel goes to {address} from {source or 'nowhere'}, not from {own_address}"
        channel: Channel | None = None
        try:
            async with asyncio.timeout(timeout_s):
                channel = await connect(address, port, self._secret, own_address if self._bind_source else None)
                await channel.send({"from": self._node, "pad": "x" * (2 * network.mtu)})
                answer = await channel.receive()
        except TimeoutError:
            symptom = (
                "accepts the connection, but larger packets are lost" if channel is not None else "does not answer"
            )
            return f"{address} {symptom} within {timeout_s:g} s"
        except AuthenticationError as error:
            return f"at {address} {error}"
        except (ChannelClosed, OSError) as error:
            return f"{address}: {getattr(error, 'strerror', None) or error}"
        finally:
            if channel is not None:
                channel.close()
        if answer["node"] != target:
            return f"node {answer['node']} answers at {address}"
        # The addresses differ if something in between translates them, which training would not survive.
        if answer["you"] != own_address:
            return f"it is seen as {answer['you']} at {address}, not as {own_address}"
        return None

    async def _answer(self, channel: Channel) -> None:
        """Answer the messages of a connection until it is closed; text messages are load."""
        # Node 0 notices lost nodes.
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await channel.receive()
                if not isinstance(message, str):
                    pad = message.get("pad") if isinstance(message, dict) else None
                    await channel.send({"node": self._node, "you": channel.remote_address, "pad": pad})
