"""The preflight of an attempt with all agents in one process, on loopback addresses, with injected faults."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any
from unittest import mock

from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec, read_spec
from slurmtrain.model.preflight.election import Candidate, ExcludedAddress
from slurmtrain.runtime.peers.channel import Channel, connect
from slurmtrain.runtime.preflight import connections, participant
from slurmtrain.runtime.preflight.connections import CoordinatorConnection, Endpoint
from slurmtrain.runtime.preflight.coordinator import coordinate
from slurmtrain.runtime.preflight.participant import Participant, PreflightOutcome, participate
from slurmtrain.runtime.preflight.ports import listen, reserve

SECRET = bytes(range(32))
# Longer than any preflight, even on a busy machine.
LONG_S = 120.0
_DISCIPLINE = {"disciplined": True, "source": "chrony", "description": "chrony follows 10.0.0.1"}
_NOT_MEASURED = ("exclude", "timeout_s", "clock", "network", "port", "bandwidth", "plugins")


def address(network: int, node: int) -> str:
    """A node's own address in one of several networks, all of which are on this machine."""
    return f"127.{network}.{node // 250}.{node % 250 + 1}"


FAST, SLOW = 2, 3


def fast(node: int, interface: str = "fast0", speed_mbps: int | None = 100_000) -> Candidate:
    return Candidate(interface=interface, address=address(FAST, node), prefix=16, speed_mbps=speed_mbps)


def slow(node: int, interface: str = "slow0", speed_mbps: int | None = 1000) -> Candidate:
    return Candidate(interface=interface, address=address(SLOW, node), prefix=16, speed_mbps=speed_mbps)


@contextlib.contextmanager
def vacant(address: str) -> Iterator[int]:
    """A port without a listener that the kernel does not assign in the meantime; binding it by number succeeds."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
        yield int(reserved.getsockname()[1])


def bridge() -> Candidate:
    """A container bridge, with the same address on every node: it leads to no other node."""
    return Candidate(interface="br0", address="127.9.0.1", prefix=16, speed_mbps=400_000)


@dataclass
class SimulatedNode:
    """One node of a preflight, and how it differs from the others.

    ``ahead_s``: how far its clock is ahead. ``joins``: whether its agent joins at all. ``hangs``: its measurements end
    only when node 0 has ended.
    """

    candidates: list[Candidate]
    excluded: list[ExcludedAddress] = field(default_factory=list)
    ahead_s: float = 0.0
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    discipline: Mapping[str, Any] = field(default_factory=lambda: _DISCIPLINE)
    bandwidth: Mapping[str, Any] = field(default_factory=lambda: {"skip": "not measured"})
    joins: bool = True
    hangs: bool = False


class SimulatedPreflight:
    """The preflight of an attempt, run by the real agents' code.

    By default nothing is wrong: every node has a fast network, a slow one, and a bridge that leads to no other node.
    ``sections`` are of the spec's ``preflight``. ``calls`` holds the arguments with which each function of a node
    was last called, by function and node.
    """

    def __init__(self, nodes: int, *, interface: str = "auto", single_machine: bool = False, **sections: Any) -> None:
        self.nodes = [SimulatedNode([fast(node), slow(node), bridge()]) for node in range(nodes)]
        self.expected_hosts = {node: f"n{node}" for node in range(nodes)}
        self.join_s = LONG_S
        self.listen: Callable[[str], socket.socket] = lambda address: listen(address, 0)
        self.calls: dict[str, dict[int, Any]] = {}
        self._single_machine = single_machine
        self._blocked: set[tuple[str, str]] = set()
        self._planned_ends: dict[tuple[int, str], str | BaseException | None] = {}
        self._signals: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[PreflightOutcome]] = {}
        self._coordinator_ended = threading.Event()
        self._reported = {topic: threading.Semaphore(0) for topic in ("join", "measure")}
        self._spec = _spec(nodes, interface, sections)

    def block(self, network: int, source: int, target: int) -> None:
        """Block connections from one node to another over one network."""
        self._blocked.add((address(network, source), address(network, target)))

    def isolate(self, network: int, node: int) -> None:
        """Block connections to and from a node over one network."""
        for other in range(len(self.nodes)):
            self.block(network, node, other)
            self.block(network, other, node)

    def end_at(self, node: int, moment: str, *, signal: str | None = None, error: BaseException | None = None) -> None:
        """Let a node's agent end at a moment: silently, by a signal, or by its own error.

        ``moment``: the call of this function: candidates, measure or bandwidth.
        """
        self._planned_ends[node, moment] = error or signal

    def run(self) -> list[PreflightOutcome | BaseException]:
        """Run the agents of all nodes; return each one's outcome or exception: a CancelledError if it died."""
        report = CoordinatorConnection.report

        async def report_and_count(connection: CoordinatorConnection, topic: str, payload: Any) -> None:
            await report(connection, topic, payload)
            if topic in self._reported:
                self._reported[topic].release()

        with (
            mock.patch.object(participant, "connect", self._connect),
            mock.patch.object(CoordinatorConnection, "report", report_and_count),
            # All agents share this process: on a busy machine each is silent for long.
            mock.patch.object(connections, "HEARTBEAT_TIMEOUT_S", LONG_S),
        ):
            return asyncio.run(self._run_agents())

    async def _run_agents(self) -> list[PreflightOutcome | BaseException]:
        listener = listen("127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], SECRET)
        for node, simulated in enumerate(self.nodes):
            participant = self._participant(node)
            if node == 0:
                alone = len(self.nodes) == 1
                self._tasks[0] = asyncio.create_task(coordinate(participant, SECRET, None if alone else listener))
            elif simulated.joins:
                self._tasks[node] = asyncio.create_task(participate(participant, lambda: [endpoint]))
        self._tasks[0].add_done_callback(lambda _: self._coordinator_ended.set())
        async with asyncio.timeout(2 * LONG_S):
            results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        listener.close()
        for result in results:
            if isinstance(result, PreflightOutcome):
                for socket_ in (result.reserved, result.control_listener):
                    if socket_ is not None:
                        socket_.close()
        return results

    def _participant(self, node: int) -> Participant:
        simulated = self.nodes[node]
        return Participant(
            node=node,
            nodes=len(self.nodes),
            host=f"n{node}",
            spec=self._spec,
            candidates=lambda: self._note_call(node, "candidates") or (simulated.candidates, simulated.excluded),
            measure=lambda own_addresses, token: self._measure(node, own_addresses, token),
            discipline=lambda: simulated.discipline,
            reserve=lambda: reserve(0),
            listen=lambda address: self._note_call(node, "listen", address) or self.listen(address),
            bandwidth=lambda *where: self._note_call(node, "bandwidth", where) or simulated.bandwidth,
            stopped=lambda: self._signals.get(node),
            single_machine=self._single_machine,
            expected_hosts=self.expected_hosts,
            now=lambda: time.time() + simulated.ahead_s,
            join_s=self.join_s if node == 0 else LONG_S,
            bind_source=True,
        )

    def _measure(self, node: int, own_addresses: Sequence[str], token: str) -> Mapping[str, Mapping[str, Any]]:
        self._note_call(node, "measure", (list(own_addresses), token))
        if node == 0 and any(simulated.hangs for simulated in self.nodes):
            self._wait_for_reports("measure", [simulated for simulated in self.nodes[1:] if not simulated.hangs])
        if self.nodes[node].hangs:
            self._coordinator_ended.wait(LONG_S)
        checks = [field_.name for field_ in fields(PreflightSpec) if field_.name not in _NOT_MEASURED]
        return {**{check: {"skip": "not measured"} for check in checks}, **self.nodes[node].facts}

    def _note_call(self, node: int, function: str, arguments: object = None) -> None:
        """Record a call of one of a node's functions, and end the node if planned."""
        self.calls.setdefault(function, {})[node] = arguments
        if node == 0 and function == "candidates" and not all(simulated.joins for simulated in self.nodes):
            self._wait_for_reports("join", [simulated for simulated in self.nodes[1:] if simulated.joins])
        if (node, function) not in self._planned_ends:
            return
        end = self._planned_ends[node, function]
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            self._signals[node] = end
        task = self._tasks[node]
        task.get_loop().call_soon_threadsafe(task.cancel)

    def _wait_for_reports(self, topic: str, nodes: Sequence[SimulatedNode]) -> None:
        """Let node 0 continue, and start its time limit for late nodes, only when these others have reported."""
        for _ in nodes:
            self._reported[topic].acquire(timeout=LONG_S)

    async def _connect(self, address: str, port: int, secret: bytes, source: str | None = None) -> Channel:
        if (source, address) in self._blocked:
            raise OSError(113, "No route to host")
        return await connect(address, port, secret, source)


def _spec(nodes: int, interface: str, sections: Mapping[str, Any]) -> Spec:
    network = sections.get("network", {})
    plain = {
        "command": "true",
        "resources": {"nodes": nodes},
        "network": {"interface": interface},
        "preflight": {
            "timeout_s": LONG_S,
            **sections,
            "network": network if isinstance(network, str) else {"timeout_s": LONG_S, **network},
        },
    }
    mistakes: list[str] = []
    spec = read_spec(plain, lambda at, message: mistakes.append(f"{at}: {message}"))
    assert not mistakes, mistakes
    return spec


class Proxy:
    """A proxy for a service on this machine: clients connect to ``port`` instead.

    ``forth`` records the data sent to the service, ``back`` the data from it. ``forth_as`` and ``back_as`` transform
    each piece before it is passed on.
    """

    def __init__(
        self,
        to_port: int,
        *,
        address: str = "127.0.0.1",
        forth_as: Callable[[bytes], bytes] = bytes,
        back_as: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.forth, self.back = bytearray(), bytearray()
        self.port = 0
        self._address = address
        self._to_port = to_port
        self._forth_as, self._back_as = forth_as, back_as
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service_reader, service_writer = await asyncio.open_connection(self._address, self._to_port)
        self._writers += [writer, service_writer]
        await asyncio.gather(
            _pass_on(reader, service_writer, self.forth, self._forth_as),
            _pass_on(service_reader, writer, self.back, self._back_as),
        )


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, recorded: bytearray, change: Callable[[bytes], bytes]
) -> None:
    has_lost = False
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            recorded += piece
            passed = change(piece)
            has_lost = has_lost or len(passed) < len(piece)
            writer.write(passed)
            await writer.drain()
    # After a gap, nothing more arrives: not even the end.
    if not has_lost:
        writer.close()
