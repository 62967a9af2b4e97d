"""Agents of one attempt in one process, on loopback addresses, and what may go wrong between them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any
from unittest import mock

from slurmtrain.model.preflight.election import Candidate, ExcludedAddress
from slurmtrain.model.spec.preflight_checks import PreflightSpec
from slurmtrain.model.spec.spec import Spec, read_spec
from slurmtrain.runtime.preflight import probe
from slurmtrain.runtime.preflight.channel import Channel, connect
from slurmtrain.runtime.preflight.connections import CoordinatorConnection, Endpoint
from slurmtrain.runtime.preflight.coordinator import coordinate
from slurmtrain.runtime.preflight.participant import Participant, PreflightOutcome, participate
from slurmtrain.runtime.preflight.sockets import listen

SECRET = bytes(range(32))
# Longer than any meeting takes, on a busy machine too.
LONG_S = 120.0
_KEPT = {"disciplined": True, "source": "chrony", "said": "chrony follows 10.0.0.1"}
_NOT_MEASURED = ("exclude", "timeout_s", "clock", "network", "port", "bandwidth", "plugins")


def address(network: int, node: int) -> str:
    """A node's own address in one of some networks; all of them are this machine's."""
    return f"127.{network}.{node // 250}.{node % 250 + 1}"


FAST, SLOW = 2, 3


def fast(node: int, interface: str = "fast0", speed_mbps: int | None = 100_000) -> Candidate:
    return Candidate(interface=interface, address=address(FAST, node), prefix=16, speed_mbps=speed_mbps)


def slow(node: int, interface: str = "slow0", speed_mbps: int | None = 1000) -> Candidate:
    return Candidate(interface=interface, address=address(SLOW, node), prefix=16, speed_mbps=speed_mbps)


@contextlib.contextmanager
def vacant(address: str) -> Iterator[int]:
    """A port at which nobody listens, and which the kernel gives to nobody meanwhile; who asks for it can have it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        yield int(held.getsockname()[1])


def bridge() -> Candidate:
    """What every node has, at the same address: it leads nowhere."""
    return Candidate(interface="br0", address="127.9.0.1", prefix=16, speed_mbps=400_000)


@dataclass
class Member:
    """One node of a meeting, and in what it differs from the others.

    ``ahead_s``: how far its clock is ahead. ``comes``: whether its agent comes at all. ``hangs``: its measures end
    only when node 0 has ended.
    """

    candidates: list[Candidate]
    excluded: list[ExcludedAddress] = field(default_factory=list)
    ahead_s: float = 0.0
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    discipline: Mapping[str, Any] = field(default_factory=lambda: _KEPT)
    bandwidth: Mapping[str, Any] = field(default_factory=lambda: {"skip": "not looked at"})
    comes: bool = True
    hangs: bool = False


class Meeting:
    """The preflight of an attempt, as its agents would hold it.

    By default all is well: every node has a fast network, a slow one, and a bridge that leads nowhere. ``sections`` are
    of the spec's ``preflight``. ``asked`` is what each node was asked: what it measures with, by node and in order.
    """

    def __init__(self, nodes: int, *, interface: str = "auto", together: bool = False, **sections: Any) -> None:
        self.members = [Member([fast(node), slow(node), bridge()]) for node in range(nodes)]
        self.expected_hosts = {node: f"n{node}" for node in range(nodes)}
        self.join_s = LONG_S
        self.listen: Callable[[str], socket.socket] = lambda address: listen(address, 0)
        self.asked: dict[str, dict[int, Any]] = {}
        self._together = together
        self._blocked: set[tuple[str, str]] = set()
        self._ends: dict[tuple[int, str], str | BaseException | None] = {}
        self._signals: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[PreflightOutcome]] = {}
        self._over = threading.Event()
        self._reported = {topic: threading.Semaphore(0) for topic in ("join", "work")}
        self._spec = _spec(nodes, interface, sections)

    def block(self, network: int, source: int, target: int) -> None:
        """Let nobody through from one node to another, over one network."""
        self._blocked.add((address(network, source), address(network, target)))

    def isolate(self, network: int, node: int) -> None:
        """Let nobody through to a node or from it, over one network."""
        for other in range(len(self.members)):
            self.block(network, node, other)
            self.block(network, other, node)

    def die(self, node: int, at: str, *, signal: str | None = None, error: BaseException | None = None) -> None:
        """Have a node's agent end at a moment: without a word, by a signal, or by an error of its own.

        ``at``: candidates, measure or bandwidth: when it is asked for that.
        """
        self._ends[node, at] = error or signal

    def hold(self) -> list[PreflightOutcome | BaseException]:
        """Let all nodes do their part; what each one came to, a CancelledError where it died."""
        report = CoordinatorConnection.report

        async def noted(guest: CoordinatorConnection, topic: str, words: Any) -> None:
            await report(guest, topic, words)
            if topic in self._reported:
                self._reported[topic].release()

        # Garbage is collected meanwhile, which is not to take the time to look at all that the tests have loaded.
        gc.freeze()
        try:
            with (
                mock.patch.object(probe, "connect", self._connect),
                mock.patch.object(CoordinatorConnection, "report", noted),
            ):
                return asyncio.run(self._hold())
        finally:
            gc.unfreeze()

    async def _hold(self) -> list[PreflightOutcome | BaseException]:
        door = listen("127.0.0.1", 0)
        there = Endpoint("127.0.0.1", door.getsockname()[1], SECRET)
        for node, member in enumerate(self.members):
            party = self._party(node)
            if node == 0:
                alone = len(self.members) == 1
                self._tasks[0] = asyncio.create_task(coordinate(party, SECRET, None if alone else door))
            elif member.comes:
                self._tasks[node] = asyncio.create_task(participate(party, lambda: [there]))
        self._tasks[0].add_done_callback(lambda _: self._over.set())
        collecting = asyncio.create_task(_collect_garbage())
        async with asyncio.timeout(2 * LONG_S):
            ended = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        collecting.cancel()
        door.close()
        for one in ended:
            if isinstance(one, PreflightOutcome) and one.listener is not None:
                one.listener.close()
        return ended

    def _party(self, node: int) -> Participant:
        member = self.members[node]
        return Participant(
            node=node,
            nodes=len(self.members),
            host=f"n{node}",
            spec=self._spec,
            candidates=lambda: self._ask(node, "candidates") or (member.candidates, member.excluded),
            measure=lambda own, token: self._measure(node, own, token),
            discipline=lambda: member.discipline,
            warm_up=lambda: self._ask(node, "warm_up"),
            listen=lambda address: self._ask(node, "listen", address) or self.listen(address),
            bandwidth=lambda *where: self._ask(node, "bandwidth", where) or member.bandwidth,
            stopped=lambda: self._signals.get(node),
            together=self._together,
            expected_hosts=self.expected_hosts,
            now=lambda: time.time() + member.ahead_s,
            join_s=self.join_s if node == 0 else LONG_S,
            bind_source=True,
        )

    def _measure(self, node: int, own: Sequence[str], token: str) -> Mapping[str, Mapping[str, Any]]:
        self._ask(node, "measure", (list(own), token))
        if node == 0 and any(member.hangs for member in self.members):
            self._await("work", [member for member in self.members[1:] if not member.hangs])
        if self.members[node].hangs:
            self._over.wait(LONG_S)
        checks = [each.name for each in fields(PreflightSpec) if each.name not in _NOT_MEASURED]
        return {**{check: {"skip": "not looked at"} for check in checks}, **self.members[node].facts}

    def _ask(self, node: int, what: str, with_what: object = None) -> None:
        """Note what a node is asked for, and end it if its time has come."""
        self.asked.setdefault(what, {})[node] = with_what
        if node == 0 and what == "warm_up" and not all(member.comes for member in self.members):
            self._await("join", [member for member in self.members[1:] if member.comes])
        if (node, what) not in self._ends:
            return
        end = self._ends[node, what]
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            self._signals[node] = end
        task = self._tasks[node]
        task.get_loop().call_soon_threadsafe(task.cancel)

    def _await(self, topic: str, members: Sequence[Member]) -> None:
        """Have node 0 wait for those who are late only from when these others have reported."""
        for _ in members:
            self._reported[topic].acquire(timeout=LONG_S)

    async def _connect(self, to: str, port: int, secret: bytes, source: str | None = None) -> Channel:
        if (source, to) in self._blocked:
            raise OSError(113, "No route to host")
        return await connect(to, port, secret, source)


async def _collect_garbage() -> None:
    """End the connections of agents that have died.

    One that a server of asyncio had accepted, but had no time to serve before it was closed, stays open as long as its
    process does, which here is for good.
    """
    while True:
        await asyncio.sleep(0.2)
        gc.collect()


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


class Middleman:
    """Stands between a service on this machine and those who connect to ``port`` instead.

    ``forth`` is what it heard going to the service, ``back`` what came from there. Of each piece it passes on what
    ``forth_as`` and ``back_as`` make of it.
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

    async def __aenter__(self) -> Middleman:
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
        their_reader, their_writer = await asyncio.open_connection(self._address, self._to_port)
        self._writers += [writer, their_writer]
        await asyncio.gather(
            _pass_on(reader, their_writer, self.forth, self._forth_as),
            _pass_on(their_reader, writer, self.back, self._back_as),
        )


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray, change: Callable[[bytes], bytes]
) -> None:
    lost = False
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            heard += piece
            kept = change(piece)
            lost = lost or len(kept) < len(piece)
            writer.write(kept)
            await writer.drain()
    # After a gap, nothing more arrives: not even the end.
    if not lost:
        writer.close()
