"""The messages of an attempt's agents, and their heartbeats: kept by node 0's agent, and reached by all others.

A message is a JSON object under a key ``round/name``; the last part of some names is the number of the node that
publishes them. The agents of an attempt know its secret and run the same code, so a message is not checked further than
by whom it is.

==================  ==========  ======  ===============================================================================
Name                Who         Shared  Meaning
==================  ==========  ======  ===============================================================================
``here/NODE``       NODE        node 0  the node has reached the begin of the round
``unready``         any node    yes     a command of the spec that runs before the ranks of a node has failed, and how;
                                        the first message counts
``begin``           node 0      yes     the port where ranks meet, and the checkpoint that they resume from
``stop``            any node    yes     all ranks have to stop, and why; the first message counts
``until``           node 0      yes     the deadline for stopping
``ended/NODE``      NODE        no      how the round ended there
``next``            node 0      yes     the nodes that have ranks in the next round, or the next stage, with other
                                        nodes, or how the attempt ended
``left/NODE``       NODE        node 0  the node needs the others no more
``paused/NODE``     NODE        yes     whether ranks of the node pause, for an evaluation for example
``pace/NODE``       NODE        no      how fast its ranks are
``links/NODE``      NODE        no      the connections of its ranks
``together``        node 0      yes     all ranks are connected
``inquiry/N``       any node    yes     the node suspects a hang; the first message counts
``examined/N/NODE`` NODE        no      the activity of its ranks
``verdict/N``       any node    yes     whether the run hangs; the first message counts
==================  ==========  ======  ===============================================================================

Shared messages are sent to all nodes at once; the others are only for node 0. Each node keeps one connection to node 0.
Its first frame is ``{"node": number}``; afterwards it may speak for that node alone. What a node then sends is a JSON
object with any of these keys:

========== =========================================================================================================
``number`` counts this node's frames over this connection, from 1 on; node 0 returns the last one in ``ack``
``beat``   how many heartbeats the node has made
``put``    messages by key, which replace existing ones
``first``  messages by key, kept only if there is none yet under that key
========== =========================================================================================================

Node 0 answers each of these with ``ack`` and ``beat``, its own number of heartbeats, and sends ``news``: the shared
messages by key, when they are published and to each new connection.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.channel import (
    NOT_A_MESSAGE,
    AuthenticationError,
    Channel,
    ChannelClosed,
    PeerListener,
    Refusals,
    connect,
    most_bytes,
)

Message: TypeAlias = Mapping[str, Any]
T = TypeVar("T")
# By the first part of a message's name. Node 0 also shares that it is here, or has left.
_FOR_ALL = frozenset({"unready", "begin", "stop", "until", "next", "paused", "together", "inquiry", "verdict"})
_BY_NODE_0 = frozenset({"begin", "until", "next", "together"})
_BY_ITS_NODE = frozenset({"here", "ended", "left", "paused", "pace", "links", "examined"})
# How long an attempt to connect may take, and the pause after it.
_CONNECT_S, _RETRY_S = 2.0, 0.2
# A connection over which nothing was answered for this long is given up for a new one: packets that were lost are sent
# again at ever longer intervals, and the next time may be long after the network has come back.
_STALE_S = 3.0
_LOOK_S = 0.5
# Node 0's machine refuses connections for this long if its agent is gone.
_GONE_S = 1.0
# How long an agent that leaves waits until the others have its last messages.
_FLUSH_S = 2.0
_POLL_S = 0.005
# How long to wait for a thread's end.
_JOIN_S = 5.0
_log = logging.getLogger("slurmtrain")


class CoordinatorGone(Exception):
    """The agent of node 0 has ended, so nothing can be published or read any more."""


class Link(Protocol):
    """An agent's access to the messages. All methods but the last may raise CoordinatorGone."""

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already."""

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none. Nodes other than node 0 only have shared messages."""

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any."""

    def beat(self, node: int, count: int) -> None:
        """Set the number of heartbeats of this agent's ``node`` so far."""

    def beats_of(self, node: int) -> int:
        """How many heartbeats of a node have arrived. Nodes other than node 0 only know node 0's."""

    def close(self) -> None:
        """End the connections, once what was published has arrived. Never raises."""


def is_shared(key: str) -> bool:
    """Whether all nodes have the message under this ``key`` at hand."""
    name = key.partition("/")[2]
    return name.partition("/")[0] in _FOR_ALL or name in ("here/0", "left/0")


def may_publish(key: str, node: int) -> bool:
    """Whether a message under this ``key`` may come from a ``node`` other than node 0."""
    kind, *numbers = key.split("/")[1:] or [""]
    return (kind in _BY_ITS_NODE and numbers[-1:] == [str(node)]) or (kind in _FOR_ALL - _BY_NODE_0 - _BY_ITS_NODE)


class MessageStore:
    """Node 0's link: the messages and heartbeats themselves. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, Message] = {}
        self._beats: dict[int, int] = {}
        self._server: _Server | None = None

    def serve(self, listener: socket.socket, secret: bytes, nodes: int, refusals: Refusals) -> None:
        """Let all other nodes of the attempt connect, from now on until :meth:`close`.

        Args:
            listener: The listening socket, which is closed in the end.
            secret: What the agents of the attempt know.
            nodes: How many nodes the attempt has, including node 0.
            refusals: Counts connections of others.
        """
        self._server = _Server(self, listener, secret, nodes, refusals)

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already."""
        with self._lock:
            if first and key in self._messages:
                return
            self._messages[key] = message
            # While the lock is held: nodes must get messages in the order of replacement.
            if self._server is not None and is_shared(key):
                self._server.spread({key: message})

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none."""
        return self._messages.get(key)

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any."""
        return {key: message for key in keys if (message := self._messages.get(key)) is not None}

    def shared(self) -> dict[str, Message]:
        """All messages that every node is to have."""
        with self._lock:
            return {key: message for key, message in self._messages.items() if is_shared(key)}

    def beat(self, node: int, count: int) -> None:
        """Set a node's number of heartbeats."""
        self._beats[node] = count

    def beats_of(self, node: int) -> int:
        """How many heartbeats of a node have arrived."""
        return self._beats.get(node, 0)

    def close(self) -> None:
        """End the connections of others, once they have what was published."""
        if self._server is not None:
            self._server.close()


class _LoopThread:
    """An event loop in a thread of its own, which runs coroutines until it is closed. For use by other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine, and return what will hold its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop's thread, soon; after :meth:`close`, do nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, last: Coroutine[Any, Any, object]) -> None:
        """Run this ``last`` coroutine for a moment, cancel what still runs, and end the thread."""
        with contextlib.suppress(TimeoutError):
            self.submit(last).result(2 * _FLUSH_S)
        self.call(self._loop.stop)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


class _Server:
    """Serves the messages to all other nodes of an attempt, in a thread of its own."""

    def __init__(
        self, store: MessageStore, listener: socket.socket, secret: bytes, nodes: int, refusals: Refusals
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._connections: dict[int, _Connection] = {}
        self._thread = _LoopThread()
        self._listener = PeerListener(listener, secret, nodes, self._serve, refusals)
        self._thread.call(self._listener.open)

    def spread(self, news: dict[str, Message]) -> None:
        """Send these messages to all nodes, soon."""
        self._thread.call(self._spread, news)

    def _spread(self, news: dict[str, Message]) -> None:
        for connection in self._connections.values():
            connection.add(news)

    def close(self) -> None:
        """Stop serving, once all connected nodes have received what was published."""
        self._thread.close(self._flush())

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                while any(connection.news or connection.answer for connection in self._connections.values()):
                    await asyncio.sleep(_POLL_S)
        await self._listener.close()

    async def _serve(self, channel: Channel) -> None:
        """Serve one node until it disconnects, or connects again: then its newest connection counts."""
        connection, node = _Connection(channel), -1
        sending = asyncio.create_task(connection.send_all())
        try:
            greeting = await channel.receive()
            number = greeting.get("node") if isinstance(greeting, dict) else None
            if type(number) is not int or not 0 < number < self._nodes:
                raise AuthenticationError(f"there is no node {number!r:.20}")
            node = number
            if node in self._connections:
                self._connections[node].channel.abort()
            self._connections[node] = connection
            connection.add(self._store.shared())
            while True:
                self._take(node, connection, await channel.receive())
        except ChannelClosed:
            pass  # it connects again if it lives; its heartbeats show that
        finally:
            sending.cancel()
            if self._connections.get(node) is connection:
                del self._connections[node]

    def _take(self, node: int, connection: _Connection, frame: Any) -> None:
        """Take in what a node has sent. Raises ChannelClosed if that is something else."""
        if not isinstance(frame, dict):
            raise ChannelClosed(NOT_A_MESSAGE)
        self._store.beat(node, frame.get("beat", 0))
        for name in ("first", "put"):
            for key, message in frame.get(name, {}).items():
                if may_publish(key, node):
                    self._store.publish(key, message, first=name == "first")
                else:
                    _log.warning("dropped a message of node %d: %.60r is not for it to publish", node, key)
        connection.answer = {"ack": frame["number"], "beat": self._store.beats_of(0)}
        connection.wake.set()


class _Connection:
    """What is to be sent over a node's connection: messages that replace each other are sent once."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.news: dict[str, Message] = {}
        self.answer: dict[str, int] = {}
        self.wake = asyncio.Event()

    def add(self, news: dict[str, Message]) -> None:
        """Send these messages, by key."""
        self.news.update(news)
        self.wake.set()

    async def send_all(self) -> None:
        """Send what there is, until the connection ends."""
        with contextlib.suppress(ChannelClosed):
            while True:
                await self.wake.wait()
                self.wake.clear()
                frame = {**self.answer, "news": self.news}
                self.news, self.answer = {}, {}
                await self.channel.send(frame)


class StoreClient:
    """The link of any other node's agent.

    A thread keeps the connection, and makes it anew when it is lost or node 0 no longer answers: the agent neither
    waits for the network nor notices an interruption that is shorter than a node may be silent. It publishes again,
    over a new connection, whatever it has published before: that does no harm, since a message that is there already is
    replaced by itself. Node 0's agent is gone if its machine refuses connections: it never stops listening while it
    lives.
    """

    def __init__(self, place: tuple[str, int], secret: bytes, node: int, nodes: int) -> None:
        """Connect the agent of ``node``, one of ``nodes`` nodes, from now on.

        ``place``: the address and port of node 0. ``secret``: what both sides must know.
        """
        self._place = place
        self._secret = secret
        self._node = node
        self._nodes = nodes
        # By key: what this node has published, and whether only as the first message. Guarded by the lock.
        self._own: dict[str, tuple[Message, bool]] = {}
        self._unsent: set[str] = set()
        self._lock = threading.Lock()
        self._shared: dict[str, Message] = {}
        self._beat = self._beats_of_node_0 = 0
        self._channel: Channel | None = None
        self._sent = self._acknowledged = 0
        self._unanswered_since: float | None = None
        self._refused_since: float | None = None
        self._is_gone = False
        self._problem = "nothing was tried yet"
        self._connected = threading.Event()
        self._thread = _LoopThread()
        self._wake = asyncio.Event()
        self._thread.submit(self._stay_connected())

    # --- for the agent ------------------------------------------------------------------------------------------------

    def wait_until_connected(self, timeout_s: float, give_up: Callable[[], bool]) -> None:
        """Wait for the first connection.

        Args:
            timeout_s: How long, in seconds.
            give_up: Called repeatedly; True ends the wait.

        Raises:
            LaunchError: There is none in time, or node 0 is gone.
        """
        deadline = time.monotonic() + timeout_s
        while not self._connected.wait(_POLL_S) and not give_up():
            if self._is_gone or time.monotonic() > deadline:
                address, port = self._place
                raise LaunchError(f"node {self._node} cannot reach node 0 at {address} port {port}: {self._problem}")

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already. Raises CoordinatorGone."""
        self._check()
        with self._lock:
            self._own[key] = (message, first)
            self._unsent.add(key)
        if is_shared(key) and not (first and key in self._shared):
            # At hand at once; if another node was first, node 0 sends that node's message.
            self._shared[key] = message
        self._thread.call(self._wake.set)

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none. Raises CoordinatorGone."""
        # First: node 0 may have published it just before it left.
        message = self._shared.get(key)
        if message is None:
            self._check()
        return message

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any. Raises CoordinatorGone."""
        self._check()
        return {key: message for key in keys if (message := self._shared.get(key)) is not None}

    def beat(self, _node: int, count: int) -> None:
        """Set this node's number of heartbeats so far. Raises CoordinatorGone."""
        self._check()
        self._beat = count
        self._thread.call(self._wake.set)

    def beats_of(self, node: int) -> int:
        """How many heartbeats of node 0 have arrived; of other nodes, none."""
        return self._beats_of_node_0 if node == 0 else 0

    def close(self) -> None:
        """Disconnect, once node 0 has what was published. Never raises."""
        self._thread.close(self._flush())

    def _check(self) -> None:
        if self._is_gone:
            raise CoordinatorGone(self._problem)

    # --- in the loop --------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while not self._is_gone:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    channel = await connect(*self._place, self._secret)
                    channel.most_bytes = most_bytes(self._nodes)
                    await channel.send({"node": self._node})
            except (OSError, AuthenticationError, ChannelClosed) as error:
                self._problem = getattr(error, "strerror", None) or str(error) or "it does not answer"
                if isinstance(error, ConnectionRefusedError):
                    # After a while that shows that node 0's agent is gone.
                    now = time.monotonic()
                    self._refused_since = self._refused_since or now
                    self._is_gone = now - self._refused_since >= _GONE_S
                else:
                    self._refused_since = None
            else:
                await self._converse(channel)
            await asyncio.sleep(_RETRY_S)

    async def _converse(self, channel: Channel) -> None:
        """Send and receive over a new connection until it ends."""
        with self._lock:
            self._unsent = set(self._own)
        self._refused_since = self._unanswered_since = None
        self._sent = self._acknowledged = 0
        self._channel = channel
        self._wake.set()
        tasks = [asyncio.create_task(self._send_all(channel)), asyncio.create_task(self._watch(channel))]
        try:
            while True:
                self._take(await channel.receive())
        except ChannelClosed as error:
            self._problem = str(error)
        finally:
            self._channel = None
            for task in tasks:
                task.cancel()
            channel.close()

    async def _send_all(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                await self._wake.wait()
                self._wake.clear()
                with self._lock:
                    unsent, self._unsent = {key: self._own[key] for key in self._unsent}, set()
                self._sent += 1
                self._unanswered_since = self._unanswered_since or time.monotonic()
                frame: dict[str, Any] = {"number": self._sent, "beat": self._beat}
                for name, is_first in (("put", False), ("first", True)):
                    frame[name] = {key: message for key, (message, first) in unsent.items() if first is is_first}
                await channel.send(frame)

    async def _watch(self, channel: Channel) -> None:
        """End the connection if nothing is answered any more."""
        while self._unanswered_since is None or time.monotonic() - self._unanswered_since < _STALE_S:
            await asyncio.sleep(_LOOK_S)
        channel.abort()

    def _take(self, frame: Any) -> None:
        """Take in what node 0 has sent. Raises ChannelClosed if that is something else."""
        if not isinstance(frame, dict):
            raise ChannelClosed(NOT_A_MESSAGE)
        self._shared.update(frame.get("news", {}))
        if "ack" in frame:
            self._acknowledged, self._beats_of_node_0 = frame["ack"], frame["beat"]
            self._unanswered_since = None if self._acknowledged >= self._sent else time.monotonic()
        self._connected.set()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                while self._channel is not None and (
                    self._unsent or self._wake.is_set() or self._sent > self._acknowledged
                ):
                    await asyncio.sleep(_POLL_S)
        if self._channel is not None:
            self._channel.close()
