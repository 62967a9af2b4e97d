"""Where the agents of an attempt meet before anything else: node 0 is the host, all others are its guests.

A guest says what it knows under a topic (``report``), the host collects that of all (``gather``) and answers all at
once (``tell``). Between, both sides beat, so that one that has died without a word is noticed.
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
from slurmtrain.runtime.preflight.channel import AuthenticationError, Channel, ChannelClosed, accept, connect
from slurmtrain.runtime.preflight.sockets import BACKLOG

# Seconds without a sign of life after which the other side counts as dead.
SILENCE_S = 15.0
_BEAT_S = 2.0
# How often to look whether the other side is silent.
_POLL_S = 1.0
# Between two tries to find a host that does not listen yet: soon at first.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5
# How long one try to reach one address may take: packets may be dropped without a word.
_TRY_S = 3.0
# How often to look whether there are more doors.
_LOOK_S = 0.1


class PeerLost(Exception):
    """Another node is gone. ``signal``: the one that it was stopped by, if it said so."""

    def __init__(self, node: int, why: str, signal: str | None = None) -> None:
        super().__init__(why)
        self.node = node
        self.signal = signal


class ResponseTimeout(Exception):
    """Some nodes have not said what they were asked for in time."""

    def __init__(self, nodes: Sequence[int]) -> None:
        super().__init__(f"nodes {', '.join(map(str, nodes))}")
        self.nodes = nodes


class ParticipantConnections:
    """Node 0's side."""

    def __init__(self, secret: bytes, nodes: int, now: Callable[[], float] = time.time) -> None:
        """``now``: this node's clock, in seconds since 1970."""
        self._secret = secret
        self._others = range(1, nodes)
        self._now = now
        self._guests: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._said: dict[str, dict[int, Any]] = {}
        self._gone: dict[int, PeerLost] = {}
        self._news = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.refused = self.received = 0

    async def listen(self, listener: socket.socket) -> None:
        """Let guests in from now on."""
        self._server = await asyncio.start_server(self._serve, sock=listener, backlog=BACKLOG)

    async def gather(self, topic: str, mine: Any, within_s: float) -> dict[int, Any]:
        """What every node says under a topic, by node. Raises Left when one is gone, Late when one takes too long."""
        deadline = time.monotonic() + within_s
        said = self._said.setdefault(topic, {})
        said[0] = mine
        while True:
            self._news.clear()
            if self._gone:
                raise next(iter(self._gone.values()))
            missing = [node for node in self._others if node not in said]
            if not missing:
                return dict(sorted(said.items()))
            left = deadline - time.monotonic()
            if left <= 0:
                raise ResponseTimeout(missing)
            await _wait_for_event(self._news, min(left, _POLL_S))
            self._look_for_silence()

    async def tell(self, topic: str, words: Any) -> None:
        """Say something to all guests."""
        for channel in self._guests.values():
            with contextlib.suppress(ChannelClosed):
                await channel.send({"topic": topic, "words": words})

    async def tell_each(self, topic: str, words: Mapping[int, Any]) -> None:
        """Say something else to each guest."""
        for node, channel in self._guests.items():
            with contextlib.suppress(ChannelClosed):
                await channel.send({"topic": topic, "words": words[node]})

    async def part(self, within_s: float) -> None:
        """Wait until the guests have left, as they do after the last words; an end from here might destroy these.

        A connection that is closed while something arrives is reset, and what was under way on it is lost (RFC 1122,
        section 4.2.2.13).
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._guests.keys() - self._gone.keys():
                    self._news.clear()
                    await self._news.wait()

    async def close(self, signal: str | None = None) -> None:
        """Send everybody away. ``signal``: what this node was stopped by."""
        if signal is not None:
            await self.tell("bye", signal)
        for channel in self._guests.values():
            channel.close()
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()

    @property
    def sent(self) -> int:
        """Messages sent."""
        return sum(channel.sent for channel in self._guests.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            channel = await accept(reader, writer, self._secret)
            await self._attend(channel)
        except AuthenticationError:
            self.refused += 1
        except asyncio.CancelledError:
            writer.close()
        finally:
            self._serving.discard(task)

    async def _attend(self, channel: Channel) -> None:
        """Listen to one guest until it leaves, or comes again over another connection."""
        node = -1
        try:
            node = int((await channel.receive())["node"])
            if node not in self._others:
                raise AuthenticationError(f"there is no node {node}")
            if node in self._guests:
                self._guests[node].close()
            self._guests[node], self._heard[node] = channel, time.monotonic()
            while True:
                await self._hear(node, channel, await channel.receive())
        except ChannelClosed as error:
            if self._guests.get(node) is channel:
                self._gone.setdefault(node, PeerLost(node, str(error)))
                self._news.set()
        finally:
            channel.close()

    async def _hear(self, node: int, channel: Channel, message: Mapping[str, Any]) -> None:
        arrived = self._now()
        self.received += 1
        self._heard[node] = time.monotonic()
        topic = message["topic"]
        if topic == "clock":
            await channel.send({"topic": "clock", "words": [message["words"], arrived, self._now()]})
        elif topic == "beat":
            await channel.send({"topic": "beat", "words": None})
        elif topic == "bye":
            self._gone[node] = PeerLost(node, "it was stopped", message["words"])
            self._news.set()
        else:
            self._said.setdefault(topic, {})[node] = message["words"]
            self._news.set()

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for node, heard in self._heard.items():
            if now - heard > SILENCE_S:
                self._gone.setdefault(node, PeerLost(node, f"it has not been heard of for {SILENCE_S:.0f} s"))


class CoordinatorConnection:
    """The side of all other nodes."""

    def __init__(self, channel: Channel, now: Callable[[], float] = time.time) -> None:
        """``now``: this node's clock, in seconds since 1970."""
        self._channel = channel
        self._now = now
        self._heard = time.monotonic()
        self._words: dict[str, deque[Any]] = {}
        self._gone: PeerLost | None = None
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    @property
    def via(self) -> tuple[str, str]:
        """The addresses of this node and of node 0 on the way between them."""
        return self._channel.here, self._channel.there

    @property
    def sent(self) -> int:
        """Messages sent."""
        return self._channel.sent

    async def report(self, topic: str, words: Any) -> None:
        """Say something to the host. Raises Left."""
        try:
            await self._channel.send({"topic": topic, "words": words})
        except ChannelClosed as error:
            raise self._gone or PeerLost(0, str(error)) from error

    async def hear(self, topic: str, within_s: float) -> Any:
        """What the host says under a topic. Raises Left when it is gone, Late when it takes too long."""
        deadline = time.monotonic() + within_s
        words = self._words.setdefault(topic, deque())
        while not words:
            self._news.clear()
            now = time.monotonic()
            if self._gone is not None:
                raise self._gone
            if now - self._heard > SILENCE_S:
                raise PeerLost(0, f"it has not been heard of for {SILENCE_S:.0f} s")
            if now > deadline:
                raise ResponseTimeout([0])
            await _wait_for_event(self._news, min(deadline - now, _POLL_S))
        return words.popleft()

    async def ask_clock(self, within_s: float) -> tuple[float, float, float, float]:
        """One exchange of the time: sent here, received there, answered there, back here; each by the clock there."""
        await self.report("clock", self._now())
        sent, received, answered, back = await self.hear("clock", within_s)
        return sent, received, answered, back

    async def close(self, signal: str | None = None) -> None:
        """Leave. ``signal``: what this node was stopped by."""
        if signal is not None:
            with contextlib.suppress(PeerLost):
                await self.report("bye", signal)
        for task in self._tasks:
            task.cancel()
        self._channel.close()

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._channel.receive())
        except ChannelClosed as error:
            self._gone = self._gone or PeerLost(0, str(error))
            self._news.set()

    def _take(self, message: Mapping[str, Any]) -> None:
        arrived, self._heard = self._now(), time.monotonic()
        topic, words = message["topic"], message["words"]
        if topic == "bye":
            self._gone = PeerLost(0, "it was stopped", words)
        else:
            self._words.setdefault(topic, deque()).append([*words, arrived] if topic == "clock" else words)
        self._news.set()

    async def _beat(self) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                await self.report("beat", None)
                await asyncio.sleep(_BEAT_S)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the host may be, and the secret that it knows."""

    address: str
    port: int
    secret: bytes


async def connect_to_coordinator(
    doors: Callable[[], Sequence[Endpoint]], node: int, within_s: float, now: Callable[[], float] = time.time
) -> tuple[CoordinatorConnection, bytes]:
    """Find the host behind any of these doors, of which there may be more while it is looked for.

    Returns this node as its guest, and the secret that both know.

    Raises LaunchError when nobody answered who knows the secret, Left when it is gone again at once.
    """
    deadline = time.monotonic() + within_s
    found: asyncio.Queue[tuple[Channel, bytes]] = asyncio.Queue()
    knocking: dict[Endpoint, asyncio.Task[None]] = {}
    said: dict[Endpoint, str] = {}
    try:
        while (left := deadline - time.monotonic()) > 0:
            for door in doors():
                if door not in knocking:
                    knocking[door] = asyncio.create_task(_keep_connecting(door, found, said))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_S)):
                    channel, secret = await found.get()
                await channel.send({"node": node})
                return CoordinatorConnection(channel, now), secret
    except ChannelClosed as error:
        raise PeerLost(0, str(error)) from error
    finally:
        for task in knocking.values():
            task.cancel()
        await asyncio.gather(*knocking.values(), return_exceptions=True)
        while not found.empty():
            found.get_nowait()[0].close()
    problems = "; ".join(dict.fromkeys(said.values())) or "nobody said where it is"
    raise LaunchError(f"node 0 could not be found within {within_s:.0f} s: {problems}")


async def _keep_connecting(
    door: Endpoint, found: asyncio.Queue[tuple[Channel, bytes]], said: dict[Endpoint, str]
) -> None:
    """Try one door again and again."""
    pause = _FIRST_PAUSE_S
    while True:
        where = f"{door.address} port {door.port}"
        try:
            async with asyncio.timeout(_TRY_S):
                channel = await connect(door.address, door.port, door.secret)
            found.put_nowait((channel, door.secret))
            return
        except TimeoutError:
            said[door] = f"{where} does not answer"
        except AuthenticationError as error:
            said[door] = f"{where}: {error}"
        except OSError as error:
            said[door] = f"{where}: {error.strerror or error}"
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LAST_PAUSE_S)


async def _wait_for_event(news: asyncio.Event, within_s: float) -> None:
    """Wait for news, but no longer. Not by asyncio.wait_for, which before Python 3.12 may swallow a cancellation."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await news.wait()
