"""A listening socket that lets only those connections through whose other side knows the attempt's secret.

Anybody who can reach a node can connect. Until a connection has proved that it belongs to the attempt, it costs one
socket for a few seconds, and there are never more than a few for each node of the attempt: the oldest one of the
address with the most connections makes room for a new one, so that a stranger's connections replace each other and not
connections of nodes. Refused connections are counted, and logged now and then.

asyncio's own servers will not do: they accept any number of connections, and from Python 3.13 on they raise an
exception when a connection is garbage-collected after the server was closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from slurmtrain.runtime.peers.channel import AuthenticationError, Channel, accept, most_bytes, plain_address

# Connections that have not proved anything yet: several of each node, since a node tries all of node 0's addresses at
# once, and some more for strangers to waste.
_WAITING, _WAITING_PER_NODE = 64, 4
# How long to pause after the system has refused to accept a connection, for lack of memory for example (accept(2)).
_PAUSE_S = 0.1
# The number of addresses that are remembered.
_ADDRESSES = 16
_log = logging.getLogger("slurmtrain")


class Refusals:
    """Counts the connections that one agent has refused, and logs the first of them and every tenfold number."""

    def __init__(self) -> None:
        self.count = 0
        """How many connections were refused."""
        self.by_address: Counter[str] = Counter()
        """How many from each address, for the first addresses."""
        self._next_note = 1

    def add(self, address: str, reason: str) -> None:
        """Count a refused connection. ``address``: where it came from; ``reason``: what was wrong with it."""
        self.count += 1
        if address in self.by_address or len(self.by_address) < _ADDRESSES:
            self.by_address[address] += 1
        if self.count >= self._next_note:
            self._next_note *= 10
            so_far = f" ({self.count} refused so far)" if self.count > 1 else ""
            _log.warning("refused a connection from %s: %s%s", address, reason, so_far)


class PeerListener:
    """Accepts connections on one socket, and serves connections of the attempt's nodes."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        nodes: int,
        serve: Callable[[Channel], Awaitable[None]],
        refusals: Refusals,
    ) -> None:
        """Nothing is accepted before :meth:`open`.

        Args:
            listener: The listening socket, which is closed in the end.
            secret: What the other side of a connection must know.
            nodes: How many nodes the attempt has, which limits how many connections are greeted at once.
            serve: Called for each authenticated connection, in a task of its own; the connection is closed afterwards.
                An AuthenticationError that it raises counts as a refusal.
            refusals: Counts the other connections.
        """
        self._listener = listener
        self._secret = secret
        self._nodes = nodes
        self._serve = serve
        self._refusals = refusals
        self._pause: asyncio.TimerHandle | None = None
        # Connections that have not proved anything yet, the oldest first: the task of each, and its address.
        self._waiting: dict[asyncio.Task[None], str] = {}
        self._waiting_by_address: Counter[str] = Counter()
        # Connections whose tasks have not begun, so that nothing closes them if these are cancelled.
        self._accepted: dict[asyncio.Task[None], socket.socket] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """The tasks of all connections."""

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Stop listening, and end all connections; connections that :meth:`Channel.close` has closed still deliver."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() != -1:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _accept(self) -> None:
        """Accept one connection that is there. Not sock_accept(): if that is cancelled, a connection may be lost."""
        try:
            connection, source = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._pause = loop.call_later(_PAUSE_S, self.open)
            return
        connection.setblocking(False)
        self._make_room()
        address = plain_address(str(source[0]))
        task = asyncio.create_task(self._admit(connection, address))
        self.tasks.add(task)
        self._accepted[task] = connection
        self._waiting[task] = address
        self._waiting_by_address[address] += 1
        task.add_done_callback(self._forget)

    def _make_room(self) -> None:
        """Drop a connection that waits, if as many wait as may."""
        if len(self._waiting) < _WAITING + _WAITING_PER_NODE * self._nodes:
            return
        [(busiest, _)] = self._waiting_by_address.most_common(1)
        task = next(task for task, address in self._waiting.items() if address == busiest)
        self._stop_waiting(task)
        task.cancel()
        self._refusals.add(busiest, "too many connections have not said who they are")

    async def _admit(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._accepted[task]
        channel: Channel | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            channel = await accept(reader, writer, self._secret)
            channel.most_bytes = most_bytes(self._nodes)
            self._stop_waiting(task)
            await self._serve(channel)
        except AuthenticationError as error:
            self._refusals.add(address, str(error))
        except OSError:
            # It has gone already.
            pass
        finally:
            if channel is not None:
                channel.close()

    def _stop_waiting(self, task: asyncio.Task[None]) -> None:
        address = self._waiting.pop(task, None)
        if address is not None:
            self._waiting_by_address[address] -= 1
            if not self._waiting_by_address[address]:
                del self._waiting_by_address[address]

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._stop_waiting(task)
        connection = self._accepted.pop(task, None)
        if connection is not None:
            connection.close()
