"""Node 0's side of the agents' connections while ranks train: it serves the board to all other nodes.

Each node keeps one authenticated connection. Its first message is ``{"node": number}``; afterwards it may speak for
that node alone. If a node connects again, its newest connection counts. What a node sends is a JSON object with any of
these keys:

========== =========================================================================================================
``number`` counts this node's messages over this connection, from 1 on; node 0 returns the last one in ``ack``
``beat``   how many heartbeats the node has made
``put``    messages by key, which replace existing ones on the board
``first``  messages by key, kept only if there is none yet under that key
``get``    keys of messages that are not shared
========== =========================================================================================================

Node 0 answers each of these with ``ack`` and ``beat``, its own number of heartbeats; it sends ``news``, the shared
messages by key, when they are published and to each new connection, and ``got``, what was asked for, by key: null if
there is no such message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from slurmtrain.runtime.peers.board import MessageBoard
from slurmtrain.runtime.peers.channel import AuthenticationError, Channel, ChannelClosed
from slurmtrain.runtime.peers.gate import Gate, Refusals
from slurmtrain.runtime.peers.loop_thread import LoopThread
from slurmtrain.runtime.peers.messages import Message

# How long nodes may take to receive the last messages before node 0 leaves.
_FLUSH_S = 2.0
_FLUSH_POLL_S = 0.01


class BoardServer:
    """Serves a board to all other nodes of an attempt, in a thread of its own."""

    def __init__(
        self, board: MessageBoard, listener: socket.socket, secret: bytes, nodes: int, refusals: Refusals
    ) -> None:
        """Serve from now on.

        Args:
            board: What to serve.
            listener: The listening socket, which the server closes.
            secret: What the agents of the attempt know.
            nodes: How many nodes the attempt has, including node 0.
            refusals: Counts connections of others.
        """
        self._board = board
        self._nodes = nodes
        self._connections: dict[int, _Connection] = {}
        self._thread = LoopThread("board")
        self._gate = Gate(listener, secret, nodes, self._serve, refusals)
        board.when_shared = lambda key, message: self._thread.call(self._spread, key, message)
        self._thread.call(self._gate.open)

    def close(self) -> None:
        """Stop serving, once all connected nodes have received what was published."""
        with contextlib.suppress(TimeoutError):
            self._thread.submit(self._close()).result(2 * _FLUSH_S)
        self._thread.close()

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                while any(connection.has_pending for connection in self._connections.values()):
                    await asyncio.sleep(_FLUSH_POLL_S)
        await self._gate.close()

    def _spread(self, key: str, message: Message) -> None:
        for connection in self._connections.values():
            connection.add_news({key: message})

    async def _serve(self, channel: Channel) -> None:
        """Serve one node until it disconnects, or connects again."""
        connection = _Connection(channel)
        node = -1
        sending = asyncio.create_task(connection.send_all())
        try:
            node = await self._greet(channel)
            if node in self._connections:
                self._connections[node].end()
            self._connections[node] = connection
            connection.add_news(self._board.shared())
            while True:
                self._handle(node, connection, await channel.receive())
        except ChannelClosed:
            pass  # it connects again if it lives; its heartbeats show that
        finally:
            sending.cancel()
            if self._connections.get(node) is connection:
                del self._connections[node]

    async def _greet(self, channel: Channel) -> int:
        """The number of the node at the other side of a new connection. Raises AuthenticationError."""
        greeting = await channel.receive()
        node = greeting.get("node") if isinstance(greeting, dict) else None
        if type(node) is not int or not 0 < node < self._nodes:
            raise AuthenticationError(f"there is no node {node!r:.20}")
        return node

    def _handle(self, node: int, connection: _Connection, message: Any) -> None:
        if not isinstance(message, dict):
            self._board.refuse(node, "it is not an object")
            return
        beat, number, keys = message.get("beat"), message.get("number"), message.get("get")
        if type(beat) is int:
            self._board.beat(node, beat)
        for name in ("put", "first"):
            messages = message.get(name, {})
            if not isinstance(messages, dict):
                self._board.refuse(node, f"its {name!r} is not an object")
                continue
            for key, content in messages.items():
                self._board.put(node, key, content, first=name == "first")
        if isinstance(keys, list):
            texts = [key for key in keys if isinstance(key, str)]
            connection.add_answers({**dict.fromkeys(texts), **self._board.read_each(texts)})
        if type(number) is int:
            connection.acknowledge(number, self._board.beats_of(0))


class _Connection:
    """What is to be sent over a node's connection: messages that replace each other are sent once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: dict[str, Any] = {}
        self._wake = asyncio.Event()

    @property
    def has_pending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._pending)

    def add_news(self, messages: dict[str, Message]) -> None:
        """Send these messages, by key."""
        self._pending.setdefault("news", {}).update(messages)
        self._wake.set()

    def add_answers(self, messages: dict[str, Message | None]) -> None:
        """Send what was asked for, by key; None: there is no such message."""
        self._pending.setdefault("got", {}).update(messages)
        self._wake.set()

    def acknowledge(self, number: int, beat: int) -> None:
        """Acknowledge the frame with this ``number``. ``beat``: node 0's heartbeats."""
        self._pending |= {"ack": number, "beat": beat}
        self._wake.set()

    def end(self) -> None:
        """End the connection at once: its node has another one."""
        self._channel.abort()

    async def send_all(self) -> None:
        """Send what there is, until the connection ends."""
        with contextlib.suppress(ChannelClosed):
            while True:
                await self._wake.wait()
                self._wake.clear()
                frame, self._pending = self._pending, {}
                await self._channel.send(frame)
