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
import os
import secrets
import struct
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
