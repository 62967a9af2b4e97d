"""The board: the newest messages of an attempt's agents, and their heartbeats, in the memory of node 0's agent.

The agent of node 0 uses it directly (:class:`LocalLink`), all others over a connection (:mod:`.board_client`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from slurmtrain.runtime.peers.messages import Message, is_shared, problem_of

_SHOWN_CHARACTERS = 60
_log = logging.getLogger("slurmtrain")


class CoordinatorGone(Exception):
    """The agent of node 0 has ended, so nothing can be published or read any more."""


class Link(Protocol):
    """An agent's access to the board. All methods may raise CoordinatorGone."""

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already."""

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none."""

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any."""

    def beat(self, count: int) -> None:
        """Set this node's number of heartbeats so far."""

    def beats_of(self, node: int) -> int:
        """How many heartbeats of a node have arrived. Nodes other than node 0 only know node 0's."""

    def close(self) -> None:
        """End the connections, once what was published has arrived. Never raises."""


class MessageBoard:
    """Messages by key, and heartbeats by node. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, Message] = {}
        self._beats: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self.when_shared: Callable[[str, Message], None] = lambda _key, _message: None
        """Called with each message that all nodes are to get. It must neither block nor use the board."""

    def put(self, author: int, key: object, message: object, *, first: bool = False) -> None:
        """Keep a ``message`` that node ``author`` has published under a ``key``; with ``first``, unless there is one.

        Whatever is not a message of that node is dropped, and logged now and then.
        """
        problem = problem_of(key, message, author)
        if problem is not None or not isinstance(key, str) or not isinstance(message, dict):
            self.refuse(author, f"{key!r:.{_SHOWN_CHARACTERS}}: {problem}")
            return
        with self._lock:
            if first and key in self._messages:
                return
            self._messages[key] = message
            # While the lock is held: nodes must get messages in the order of replacement.
            if is_shared(key):
                self.when_shared(key, message)

    def refuse(self, author: int, problem: str) -> None:
        """Count something that node ``author`` has sent, and that was dropped because of this ``problem``."""
        with self._lock:
            count = self._refused[author] = self._refused.get(author, 0) + 1
        if str(count).strip("0") == "1":
            _log.warning("dropped a message of node %d (%d so far): %s", author, count, problem)

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any."""
        with self._lock:
            return {key: self._messages[key] for key in keys if key in self._messages}

    def shared(self) -> dict[str, Message]:
        """All messages that every node is to have."""
        with self._lock:
            return {key: message for key, message in self._messages.items() if is_shared(key)}

    def beat(self, node: int, count: int) -> None:
        """Set a node's number of heartbeats."""
        self._beats[node] = count

    def beats_of(self, node: int) -> int:
        """A node's number of heartbeats."""
        return self._beats.get(node, 0)


class LocalLink:
    """The link of an agent to a board in its own process, which is node 0's."""

    def __init__(self, board: MessageBoard, node: int = 0, close: Callable[[], None] = lambda: None) -> None:
        """For the agent of ``node``; ``close`` ends what serves the ``board`` to others."""
        self._board = board
        self._node = node
        self._close = close

    def publish(self, key: str, message: Message, *, first: bool = False) -> None:
        """Put a ``message`` under a ``key``; with ``first``, unless there is one already."""
        self._board.put(self._node, key, message, first=first)

    def read(self, key: str) -> Message | None:
        """The message under a key; None if there is none."""
        return self._board.read_each([key]).get(key)

    def read_each(self, keys: Iterable[str]) -> dict[str, Message]:
        """The messages under these keys, as far as there are any."""
        return self._board.read_each(keys)

    def beat(self, count: int) -> None:
        """Set this node's number of heartbeats so far."""
        self._board.beat(self._node, count)

    def beats_of(self, node: int) -> int:
        """How many heartbeats of a node have arrived."""
        return self._board.beats_of(node)

    def close(self) -> None:
        """End the connections of others, once they have what was published."""
        self._close()
