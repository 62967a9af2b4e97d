"""The connections between node 0, the coordinator of a preflight, and all other nodes, its participants.

Each participant keeps one authenticated connection (:mod:`slurmtrain.runtime.peers.channel`) to the coordinator for as
long as the preflight lasts. A message is ``{"topic": text, "payload": JSON}``; the first one of a connection is
``{"node": number}`` instead.

=============  ====================  ===========================================================================
Topic          Who sends it          When, and with which payload
=============  ====================  ===========================================================================
``join``       each participant      once, first: the result of :func:`.participant.make_join_report`
``command``    the coordinator       the next action, under ``"do"``: ``measure``, ``rate``, ``bandwidth`` or ``end``
``measure``,   each participant      after the command of that name: its measurements
``rate``,
``bandwidth``
``clock``      each participant      its time, any number of times; the coordinator answers at once with that time,
                                     its own on arrival, and its own on sending (RFC 5905, section 8)
``heartbeat``  both sides            a participant every 2 s, and the coordinator in answer to each
``stopped``    both sides            before they disconnect because of a signal: the signal's name
=============  ====================  ===========================================================================

The coordinator works in rounds: it collects one report from every node (:meth:`ParticipantConnections.gather`), then
sends every node its next command. A peer that disconnects, or sends nothing for 15 s, is lost (:class:`PeerLost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.channel import (
    NOT_A_MESSAGE,
    AuthenticationError,
    Channel,
    ChannelClosed,
    PeerListener,
    Refusals,
    connect,
)

# Seconds without a message after which a peer counts as dead: several heartbeats, since a node that imports torch from
# a busy filesystem may stall for some seconds.
HEARTBEAT_TIMEOUT_S = 15.0
_HEARTBEAT_S = 2.0
# How often to check for peers whose heartbeats have stopped.
_POLL_S = 1.0
# Between two attempts to connect to an endpoint: short at first, since node 0 usually listens a moment later.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 0.5
# How long one attempt to connect may take: a firewall may drop packets silently, and the kernel retries for minutes.
_CONNECT_TIMEOUT_S = 3.0
# How often to check for newly discovered endpoints.
_DISCOVERY_POLL_S = 0.1


class PeerLost(Exception):
    """Another node has disconnected, or no longer sends heartbeats; the message says how.

    ``node`` is its number. ``signal``: the name of the signal that stopped it, if it reported one.
    """

    def __init__(self, node: int, reason: str, signal: str | None = None) -> None:
        """``node`` is lost for ``reason``; ``signal``: what stopped it, if it reported one."""
        super().__init__(reason)
        self.node = node
        self.signal = signal


class ResponseTimeout(Exception):
    """Some nodes did not send the expected message in time; ``nodes`` are their numbers."""

    def __init__(self, nodes: Sequence[int]) -> None:
        super().__init__(f"nodes {', '.join(map(str, nodes))}")
        self.nodes = nodes


class ParticipantConnections:
    """The coordinator's side: one connection from each participant. ``received`` counts messages."""

    def __init__(
        self, secret: bytes, nodes: int, now: Callable[[], float] = time.time, refusals: Refusals | None = None
    ) -> None:
        """Serve one attempt.

        Args:
            secret: The attempt's secret, which every participant must know.
            nodes: How many nodes the attempt has, including node 0.
            now: This node's clock, in seconds since 1970.
            refusals: Counts connections of others.
        """
        self._secret = secret
        self._participants = range(1, nodes)
        self._now = now
        self._channels: dict[int, Channel] = {}
        # When the last message of each participant arrived, by the monotonic clock.
        self._last_message: dict[int, float] = {}
        self._reports: dict[str, dict[int, Any]] = {}
        self._lost: dict[int, PeerLost] = {}
        # Set at each report and each disconnect, to wake whatever waits for either.
        self._changed = asyncio.Event()
        self._refusals = refusals or Refusals()
        self._gate: PeerListener | None = None
        self.received = 0

    async def listen(self, listener: socket.socket) -> None:
        """Accept participants from now on."""
        nodes = len(self._participants) + 1
        self._gate = PeerListener(listener, self._secret, nodes, self._receive_all, self._refusals)
        self._gate.open()

    async def gather(self, topic: str, own_report: Any, timeout_s: float) -> dict[int, Any]:
        """Wait for every node's report under a topic, and return the reports by node.

        Args:
            topic: The topic of the reports.
            own_report: What node 0 itself contributes.
            timeout_s: Seconds to wait for the last one.

        Raises:
            PeerLost: A participant is lost.
            ResponseTimeout: Some participants have not reported in time.
        """
        deadline = time.monotonic() + timeout_s
        reports = self._reports.setdefault(topic, {})
        reports[0] = own_report
        while True:
            # Cleared before checking, so that nothing that arrives afterwards is missed.
            self._changed.clear()
            if self._lost:
                raise next(iter(self._lost.values()))
            missing = [node for node in self._participants if node not in reports]
            if not missing:
                return dict(sorted(reports.items()))
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ResponseTimeout(missing)
            await _wait_for_event(self._changed, min(remaining_s, _POLL_S))
            for node, last in self._last_message.items():
                if time.monotonic() - last > HEARTBEAT_TIMEOUT_S:
                    self._lost.setdefault(node, _heartbeat_lost(node))

    async def broadcast(self, topic: str, payload: Any) -> None:
        """Send the same message to all participants."""
        await self.send_each(topic, dict.fromkeys(self._channels, payload))

    async def send_each(self, topic: str, payloads: Mapping[int, Any]) -> None:
        """Send each participant its own message; ``payloads`` are by node."""
        # Iterate over a copy: another participant may connect while a message is being sent.
        for node, channel in list(self._channels.items()):
            # The next gather notices lost participants.
            with contextlib.suppress(ChannelClosed):
                await channel.send({"topic": topic, "payload": payloads[node]})

    async def wait_for_disconnects(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for all participants to disconnect, as they do after the last command.

        Closing first might destroy that command: a connection that is closed while data arrives is reset, and data in
        transit on it is lost (RFC 1122, section 4.2.2.13).
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._channels.keys() - self._lost.keys():
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self, signal: str | None = None) -> None:
        """Disconnect all participants. ``signal``: what stopped this node, reported to them first."""
        if signal is not None:
            await self.broadcast("stopped", signal)
        for channel in self._channels.values():
            channel.close()
        if self._gate is not None:
            await self._gate.close()

    @property
    def sent(self) -> int:
        """Messages sent."""
        return sum(channel.sent for channel in self._channels.values())

    async def _receive_all(self, channel: Channel) -> None:
        """Handle the messages of one participant until it disconnects, or connects again."""
        node: Any = None
        try:
            hello = await channel.receive()
            node = hello.get("node") if isinstance(hello, dict) else None
            if type(node) is not int:
                raise ChannelClosed(NOT_A_MESSAGE)
            if node not in self._participants:
                raise AuthenticationError(f"there is no node {node}")
            # If a participant connects again, its newest connection counts.
            if node in self._channels:
                self._channels[node].close()
            self._channels[node], self._last_message[node] = channel, time.monotonic()
            while True:
                await self._handle(node, channel, await channel.receive())
        except ChannelClosed as error:
            if self._channels.get(node) is channel:
                # setdefault: a signal that it reported before takes precedence.
                self._lost.setdefault(node, PeerLost(node, str(error)))
                self._changed.set()

    async def _handle(self, node: int, channel: Channel, message: Any) -> None:
        # Taken first: any delay before this stamp makes the clock's offset less certain.
        arrived = self._now()
        self.received += 1
        self._last_message[node] = time.monotonic()
        topic, payload = _content(message)
        if topic == "clock":
            await channel.send({"topic": "clock", "payload": [payload, arrived, self._now()]})
        elif topic == "heartbeat":
            await channel.send({"topic": "heartbeat", "payload": None})
        elif topic == "stopped":
            self._lost[node] = PeerLost(node, "it was stopped", str(payload))
            self._changed.set()
        else:
            self._reports.setdefault(topic, {})[node] = payload
            self._changed.set()


class CoordinatorConnection:
    """A participant's side: its connection to the coordinator."""

    def __init__(self, channel: Channel, now: Callable[[], float] = time.time) -> None:
        """``now``: this node's clock, in seconds since 1970."""
        self._channel = channel
        self._now = now
        self._last_message = time.monotonic()
        self._payloads: dict[str, deque[Any]] = {}
        self._lost: PeerLost | None = None
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive_all()), asyncio.create_task(self._send_heartbeats())]

    @property
    def route(self) -> tuple[str, str]:
        """The two ends of the connection: this node's address and node 0's."""
        return self._channel.local_address, self._channel.remote_address

    @property
    def sent(self) -> int:
        """Messages sent."""
        return self._channel.sent

    async def report(self, topic: str, payload: Any) -> None:
        """Send a message to the coordinator. Raises PeerLost."""
        try:
            await self._channel.send({"topic": topic, "payload": payload})
        except ChannelClosed as error:
            # A signal that the coordinator reported explains more than the disconnect that followed.
            raise self._lost or PeerLost(0, str(error)) from error

    async def receive(self, topic: str, timeout_s: float) -> Any:
        """The payload of the coordinator's next message under a topic.

        Raises PeerLost when it is lost, ResponseTimeout when nothing comes within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        payloads = self._payloads.setdefault(topic, deque())
        while not payloads:
            self._changed.clear()
            now = time.monotonic()
            if self._lost is not None:
                raise self._lost
            if now - self._last_message > HEARTBEAT_TIMEOUT_S:
                raise _heartbeat_lost(0)
            if now > deadline:
                raise ResponseTimeout([0])
            await _wait_for_event(self._changed, min(deadline - now, _POLL_S))
        return payloads.popleft()

    async def exchange_clock_stamps(self, timeout_s: float) -> tuple[float, float, float, float]:
        """Exchange the time once: sent by this node, received and answered by node 0, received by this node.

        Each stamp is by the clock of the node named, in seconds since 1970. Raises PeerLost and ResponseTimeout.
        """
        await self.report("clock", self._now())
        sent, received, answered, returned = await self.receive("clock", timeout_s)
        return sent, received, answered, returned

    async def close(self, signal: str | None = None) -> None:
        """Disconnect. ``signal``: what stopped this node, reported to the coordinator first."""
        if signal is not None:
            with contextlib.suppress(PeerLost):
                await self.report("stopped", signal)
        for task in self._tasks:
            task.cancel()
        self._channel.close()

    async def _receive_all(self) -> None:
        try:
            while True:
                self._handle(await self._channel.receive())
        except ChannelClosed as error:
            self._lost = self._lost or PeerLost(0, str(error))
            self._changed.set()

    def _handle(self, message: Any) -> None:
        # Taken first: this is the last stamp of a clock exchange.
        arrived, self._last_message = self._now(), time.monotonic()
        topic, payload = _content(message)
        if topic == "stopped":
            self._lost = PeerLost(0, "it was stopped", str(payload))
        else:
            self._payloads.setdefault(topic, deque()).append([*payload, arrived] if topic == "clock" else payload)
        self._changed.set()

    async def _send_heartbeats(self) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                await self.report("heartbeat", None)
                await asyncio.sleep(_HEARTBEAT_S)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and a port at which the coordinator may listen, and the secret that it must know."""

    address: str
    port: int
    secret: bytes


async def connect_to_coordinator(
    known_endpoints: Callable[[], Sequence[Endpoint]], node: int, timeout_s: float, now: Callable[[], float] = time.time
) -> tuple[CoordinatorConnection, bytes]:
    """Try all endpoints in parallel, and keep the first connection whose other side knows the secret.

    Args:
        known_endpoints: Where node 0 may listen; called repeatedly, since more may become known.
        node: This node's number.
        timeout_s: Seconds after which to give up.
        now: This node's clock, in seconds since 1970.

    Returns:
        The connection, and the secret that both sides know.

    Raises:
        LaunchError: Nothing that knows the secret answered in time.
        PeerLost: The connection ended at once.
    """
    deadline = time.monotonic() + timeout_s
    connected: asyncio.Queue[tuple[Channel, bytes]] = asyncio.Queue()
    attempts: dict[Endpoint, asyncio.Task[None]] = {}
    problems: dict[Endpoint, str] = {}
    try:
        while (remaining_s := deadline - time.monotonic()) > 0:
            for endpoint in known_endpoints():
                if endpoint not in attempts:
                    attempts[endpoint] = asyncio.create_task(_keep_connecting(endpoint, connected, problems))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(remaining_s, _DISCOVERY_POLL_S)):
                    channel, secret = await connected.get()
                await channel.send({"node": node})
                return CoordinatorConnection(channel, now), secret
    except ChannelClosed as error:
        raise PeerLost(0, str(error)) from error
    finally:
        for task in attempts.values():
            task.cancel()
        await asyncio.gather(*attempts.values(), return_exceptions=True)
        # Several endpoints may be addresses of the same node 0: only the first connection is needed.
        while not connected.empty():
            connected.get_nowait()[0].close()
    reasons = "; ".join(dict.fromkeys(problems.values())) or "its address is unknown"
    raise LaunchError(f"node 0 could not be found within {timeout_s:.0f} s: {reasons}")


async def _keep_connecting(
    endpoint: Endpoint, connected: asyncio.Queue[tuple[Channel, bytes]], problems: dict[Endpoint, str]
) -> None:
    """Try to connect to one endpoint until it succeeds; ``problems`` keeps the last failure."""
    pause = _FIRST_RETRY_S
    while True:
        place = f"{endpoint.address} port {endpoint.port}"
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                channel = await connect(endpoint.address, endpoint.port, endpoint.secret)
            connected.put_nowait((channel, endpoint.secret))
            return
        except TimeoutError:
            problems[endpoint] = f"{place} does not answer"
        except AuthenticationError as error:
            problems[endpoint] = f"{place}: {error}"
        except OSError as error:
            problems[endpoint] = f"{place}: {error.strerror or error}"
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LAST_RETRY_S)


def _content(message: Any) -> tuple[str, Any]:
    """The topic and the payload of any other message. Raises ChannelClosed if it is something else."""
    if not isinstance(message, dict) or not isinstance(message.get("topic"), str) or "payload" not in message:
        raise ChannelClosed(NOT_A_MESSAGE)
    return message["topic"], message["payload"]


def _heartbeat_lost(node: int) -> PeerLost:
    return PeerLost(node, f"it has not sent a heartbeat for {HEARTBEAT_TIMEOUT_S:.0f} s")


async def _wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event for at most ``timeout_s`` seconds.

    asyncio.wait_for will not do: before Python 3.12 it may swallow a cancellation that arrives together with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
