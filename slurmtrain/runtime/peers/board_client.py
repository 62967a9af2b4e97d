"""The side of all nodes but node 0 of the agents' connections while ranks train: access to the board at node 0.

A thread keeps the connection, and makes it anew when it is lost or node 0 no longer answers: the agent neither waits
for the network nor notices an interruption that is shorter than a node may be silent. It publishes again, over a new
connection, whatever it has published before: that does no harm, since a message that is there already is replaced by
itself. Node 0's agent is gone if its machine refuses connections: it never stops listening while it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.board import CoordinatorGone
from slurmtrain.runtime.peers.channel import (
    NOT_A_MESSAGE,
    AuthenticationError,
    Channel,
    ChannelClosed,
    connect,
    most_bytes,
)
from slurmtrain.runtime.peers.loop_thread import LoopThread
from slurmtrain.runtime.peers.messages import Message, is_shared, problem_of

# How long an attempt to connect may take, and the pause after it.
_CONNECT_S, _RETRY_S = 2.0, 0.2
# A connection over which nothing was answered for this long is given up for a new one: packets that were lost are sent
# again at ever longer intervals, and the next time may be long after the network has come back.
_STALE_S = 3.0
_LOOK_S = 0.5
# Node 0's machine refuses connections for this long if its agent is gone.
_GONE_S = 1.0
# How long to wait for messages that are not at hand, and, at the end, until node 0 has what was published.
_ANSWER_S = 2.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class BoardPlace:
    """Where node 0 serves the board: an address, a port, and the secret that both sides must know."""

    address: str
    port: int
    secret: bytes


class BoardClient:
    """The link of an agent to the board at node 0 (:class:`.board.Link`)."""

    def __init__(self, place: BoardPlace, node: int, nodes: int) -> None:
        """Connect the agent of ``node``, one of ``nodes`` nodes, to the board at this ``place``, from now on."""
        self._place = place
        self._node = node
        self._nodes = nodes
        # By key: what this node has published, and whether only as the first message. Guarded by the lock.
        self._own: dict[str, tuple[Message, bool]] = {}
        self._unsent: set[str] = set()
        self._lock = threading.Lock()
        # Written by the thread of the loop alone.
        self._shared: dict[str, Message] = {}
        self._beat = self._beats_of_node_0 = 0
        self._channel: Channel | None = None
        self._sent = self._acknowledged = 0
        self._unanswered_since: float | None = None
        self._requests: list[_Request] = []
        self._refused_since: float | None = None
        self._is_gone = False
        self._problem = "nothing was tried yet"
        self._connected = threading.Event()
        self._thread = LoopThread("board")
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
                place = f"{self._place.address} port {self._place.port}"
                raise LaunchError(f"node {self._node} cannot reach node 0 at {place}: {self._problem}")

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already. Raises CoordinatorGone."""
        self._check()
        with self._lock:
            self._own[key] = (message, first)
            self._unsent.add(key)
        self._thread.call(self._wake.set)

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none, or it does not arrive in time. Raises CoordinatorGone."""
        if not is_shared(key):
            return self.read_each([key]).get(key)
        # First: node 0 may have published it just before it left.
        message = self._shared.get(key)
        if message is None:
            self._check()
        return message

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any and they arrive in time. Raises CoordinatorGone."""
        self._check()
        keys = list(keys)
        got = {key: message for key in keys if (message := self._shared.get(key)) is not None}
        missing = [key for key in keys if not is_shared(key)]
        if missing and self._channel is not None:
            with contextlib.suppress(TimeoutError):
                got |= self._thread.submit(self._fetch(missing)).result(2 * _ANSWER_S)
        return got

    def beat(self, count: int) -> None:
        """Set this node's number of heartbeats so far. Raises CoordinatorGone."""
        self._check()
        self._beat = count
        self._thread.call(self._wake.set)

    def beats_of(self, node: int) -> int:
        """How many heartbeats of node 0 have arrived; of other nodes, none."""
        return self._beats_of_node_0 if node == 0 else 0

    def close(self) -> None:
        """Disconnect, once node 0 has what was published. Never raises."""
        with contextlib.suppress(TimeoutError):
            self._thread.submit(self._flush()).result(2 * _ANSWER_S)
        self._thread.close()

    def _check(self) -> None:
        if self._is_gone:
            raise CoordinatorGone(self._problem)

    # --- in the loop --------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while not self._is_gone:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    channel = await connect(self._place.address, self._place.port, self._place.secret)
                    channel.most_bytes = most_bytes(self._nodes)
                    await channel.send({"node": self._node})
            except (OSError, AuthenticationError, ChannelClosed) as error:
                self._note_failure(error)
            else:
                await self._converse(channel)
            await asyncio.sleep(_RETRY_S)

    def _note_failure(self, error: Exception) -> None:
        """Note that an attempt to connect has failed, and whether that shows that node 0's agent is gone."""
        self._problem = getattr(error, "strerror", None) or str(error) or "it does not answer"
        if not isinstance(error, ConnectionRefusedError):
            self._refused_since = None
            return
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        self._is_gone = now - self._refused_since >= _GONE_S

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
                self._handle(await channel.receive())
        except ChannelClosed as error:
            self._problem = str(error)
        finally:
            self._channel = None
            for task in tasks:
                task.cancel()
            for request in self._requests:
                request.end({})
            channel.close()

    async def _send_all(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._sent += 1
                self._unanswered_since = self._unanswered_since or time.monotonic()
                await channel.send(self._next_frame())

    def _next_frame(self) -> dict[str, Any]:
        with self._lock:
            unsent = {key: self._own[key] for key in self._unsent}
            self._unsent = set()
        frame: dict[str, Any] = {"number": self._sent, "beat": self._beat}
        for name, is_first in (("put", False), ("first", True)):
            messages = {key: message for key, (message, first) in unsent.items() if first is is_first}
            frame |= {name: messages} if messages else {}
        keys = [key for request in self._requests for key in request.keys]
        return frame | ({"get": keys} if keys else {})

    async def _watch(self, channel: Channel) -> None:
        """End the connection if nothing is answered any more."""
        while self._unanswered_since is None or time.monotonic() - self._unanswered_since < _STALE_S:
            await asyncio.sleep(_LOOK_S)
        channel.abort()

    def _handle(self, frame: Any) -> None:
        """Take in what node 0 has sent. Raises ChannelClosed if that is something else."""
        if not isinstance(frame, dict) or not isinstance(frame.get("news", {}), dict):
            raise ChannelClosed(NOT_A_MESSAGE)
        # Node 0 has looked whose messages these are.
        for key, message in frame.get("news", {}).items():
            if problem_of(key, message, 0) is None:
                self._shared[key] = message
        if type(frame.get("beat")) is int:
            self._beats_of_node_0 = frame["beat"]
        if type(frame.get("ack")) is int:
            self._acknowledged = frame["ack"]
            self._unanswered_since = None if self._acknowledged >= self._sent else time.monotonic()
        if isinstance(frame.get("got"), dict):
            for request in self._requests:
                request.take(frame["got"])
        self._connected.set()

    async def _fetch(self, keys: list[str]) -> dict[str, Message]:
        if self._channel is None:
            return {}
        request = _Request(keys, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._wake.set()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await request.answer
        finally:
            self._requests.remove(request)

    async def _flush(self) -> None:
        async with asyncio.timeout(_ANSWER_S):
            while self._channel is not None and (
                self._unsent or self._wake.is_set() or self._sent > self._acknowledged
            ):
                await asyncio.sleep(_POLL_S)
        if self._channel is not None:
            self._channel.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Keys of messages that were asked for, and what holds the answer."""

    keys: list[str]
    answer: asyncio.Future[dict[str, Message]]

    def take(self, got: dict[str, Message | None]) -> None:
        """Take the answer from ``got``, the messages by key, unless that answers an earlier request."""
        if got.keys() >= set(self.keys):
            self.end({key: message for key in self.keys if (message := got[key]) is not None})

    def end(self, messages: dict[str, Message]) -> None:
        """End with this answer, unless there is one."""
        if not self.answer.done():
            self.answer.set_result(messages)
