"""Authenticated messages between two agents of one attempt, over TCP: JSON, each with a signature.

The handshake: both sides send a random nonce, and prove by an HMAC (SHA-256, RFC 2104) of both nonces that they know
the attempt's secret. Another HMAC of the nonces is the key of the connection, under which every message is numbered and
signed. Connections from outside the attempt are therefore refused before any of their messages is read, and nothing can
be replayed. Nothing is encrypted: the secret itself is never sent, and the messages contain no other secret.

=====  =================================================  ======================================
Order  Connecting side                                    Accepting side
=====  =================================================  ======================================
1                                                         magic, nonce
2      nonce, HMAC("c", both nonces)
3                                                         HMAC("s", both nonces)
4...   messages: length, JSON, HMAC(side, number, JSON)   the same
=====  =================================================  ======================================
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

# Distinguishes an agent from another service on the port, and versions of the protocol from each other.
_MAGIC = b"slurmtrain/1"
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
# Messages from peers without the secret are never read, so this limit is not a defence: it fails fast if the two sides
# disagree about where a message begins.
_MESSAGE_BYTES, _MESSAGE_BYTES_PER_NODE = 1 << 24, 1 << 16
_LENGTH = struct.Struct(">I")
# How long the other side may take over the handshake: an agent on a busy node may need seconds. One that takes longer
# connects again.
_HANDSHAKE_S = 5.0
# Why a connection is closed that delivers something else than a message.
NOT_A_MESSAGE = "it sent something that is not a message"


class AuthenticationError(Exception):
    """The other side is not an agent of this attempt: it does not know the secret, or does not speak this protocol."""


class ChannelClosed(Exception):
    """The connection has ended; the message says how."""


def most_bytes(nodes: int) -> int:
    """The length of the longest message, in bytes, in an attempt of this many nodes: some hold a line for each node."""
    return _MESSAGE_BYTES + nodes * _MESSAGE_BYTES_PER_NODE


class Channel:
    """One authenticated connection.

    Attributes:
        sent: How many messages this side has sent.
        most_bytes: The length of the longest message that is received.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, accepted: bool
    ) -> None:
        """Use ``reader`` and ``writer`` after a handshake agreed on ``key``; ``accepted``: this side accepted."""
        self.most_bytes = most_bytes(1)
        self._reader = reader
        self._writer = writer
        self._key = key
        # Each direction signs differently, so a message cannot be reflected to its sender.
        self._own_side, self._other_side = (b"s", b"c") if accepted else (b"c", b"s")
        self.sent = self._received = 0

    @property
    def local_address(self) -> str:
        """This side's address."""
        return plain_address(self._writer.get_extra_info("sockname")[0])

    @property
    def remote_address(self) -> str:
        """The other side's address, as this side sees it."""
        return plain_address(self._writer.get_extra_info("peername")[0])

    async def send(self, message: object) -> None:
        """Send one message that JSON can represent. Raises ChannelClosed."""
        text = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._writer.write(_LENGTH.pack(len(text)) + text + self._sign(self._own_side, self.sent, text))
            # Counted before waiting: another task may send in the meantime, and its message needs the next number.
            self.sent += 1
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed(_describe_error(error)) from error

    async def receive(self) -> Any:
        """The next message. Raises ChannelClosed, also for a message whose signature is wrong."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self.most_bytes:
                raise ChannelClosed(NOT_A_MESSAGE)
            text = await self._reader.readexactly(length)
            signature = await self._reader.readexactly(_DIGEST_BYTES)
        except asyncio.IncompleteReadError as error:
            raise ChannelClosed("it closed the connection") from error
        except OSError as error:
            raise ChannelClosed(_describe_error(error)) from error
        if not hmac.compare_digest(signature, self._sign(self._other_side, self._received, text)):
            raise ChannelClosed("it sent a message with a wrong signature")
        self._received += 1
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ChannelClosed(NOT_A_MESSAGE) from error

    def close(self) -> None:
        """End the connection; what has been sent still arrives."""
        # A RuntimeError: the event loop has been closed.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()

    def abort(self) -> None:
        """End the connection at once; what has been sent may be lost."""
        _abort(self._writer)

    def _sign(self, side: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + text, "sha256")


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Channel:
    """Do the accepting side's part of the handshake on a new connection.

    Args:
        reader: What the other side sends.
        writer: What is sent to it.
        secret: The attempt's secret.

    Raises:
        AuthenticationError: The other side is not an agent of this attempt; the connection is then closed.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            writer.write(_MAGIC + own_nonce)
            other_nonce = await reader.readexactly(_NONCE_BYTES)
            proof = await reader.readexactly(_DIGEST_BYTES)
            if not hmac.compare_digest(proof, _proof(secret, b"c", own_nonce, other_nonce)):
                raise AuthenticationError("it does not know the secret of this attempt")
            writer.write(_proof(secret, b"s", own_nonce, other_nonce))
            await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        _abort(writer)
        raise AuthenticationError("it did not say who it is") from error
    except BaseException:
        _abort(writer)
        raise
    return Channel(reader, writer, _proof(secret, b"k", own_nonce, other_nonce), accepted=True)


async def connect(address: str, port: int, secret: bytes, source: str | None = None) -> Channel:
    """Connect to an agent, and do the connecting side's part of the handshake.

    This takes as long as the kernel allows; the caller sets a time limit.

    Args:
        address: A numeric address.
        port: The port there.
        secret: The attempt's secret.
        source: The address to connect from; by default the kernel chooses.

    Raises:
        OSError: Nothing answers.
        AuthenticationError: What answers is not an agent of this attempt.
    """
    try:
        reader, writer = await asyncio.open_connection(address, port, local_addr=(source, 0) if source else None)
    except OSError as error:
        if error.errno is None:
            raise
        # asyncio's message repeats the address, and differs between versions of Python.
        raise OSError(error.errno, os.strerror(error.errno)) from error
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        greeting = await reader.readexactly(len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            raise AuthenticationError("something else listens there")
        other_nonce = greeting[len(_MAGIC) :]
        writer.write(own_nonce + _proof(secret, b"c", other_nonce, own_nonce))
        proof = await reader.readexactly(_DIGEST_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"s", other_nonce, own_nonce)):
            raise AuthenticationError("it does not know the secret of this attempt")
    except asyncio.IncompleteReadError as error:
        _abort(writer)
        raise AuthenticationError("it is not an agent of this attempt, or closed the connection") from error
    except BaseException:
        _abort(writer)
        raise
    return Channel(reader, writer, _proof(secret, b"k", other_nonce, own_nonce), accepted=False)


def _proof(secret: bytes, side: bytes, accepting_nonce: bytes, connecting_nonce: bytes) -> bytes:
    """The proof that a side knows the secret; with ``b"k"`` as ``side``, the key of the connection."""
    return hmac.digest(secret, side + accepting_nonce + connecting_nonce, "sha256")


def _abort(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        writer.transport.abort()


def plain_address(address: str) -> str:
    """An ``address`` without an IPv6 scope, and without the prefix of IPv4 addresses on a socket for both families."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _describe_error(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


# --- a listening socket that lets only members of the attempt through -------------------------------------------------
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
        if len(self._waiting) >= _WAITING + _WAITING_PER_NODE * self._nodes:
            # As many wait as may: one of them is dropped.
            [(busiest, _)] = self._waiting_by_address.most_common(1)
            task = next(task for task, address in self._waiting.items() if address == busiest)
            self._stop_waiting(task)
            task.cancel()
            self._refusals.add(busiest, "too many connections have not said who they are")
        address = plain_address(str(source[0]))
        task = asyncio.create_task(self._admit(connection, address))
        self.tasks.add(task)
        self._accepted[task] = connection
        self._waiting[task] = address
        self._waiting_by_address[address] += 1
        task.add_done_callback(self._forget)

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
