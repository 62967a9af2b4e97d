"""Messages between the agents of one attempt, over TCP: JSON, each with a proof that its sender knows the secret.

Both sides say a nonce, and answer the other's with an HMAC (SHA-256, RFC 2104) under the attempt's secret; the nonces
give the connection a key of its own, under which every message is numbered and signed. So a stranger's connection is
refused before it is read, and nothing can be replayed. Nothing is encrypted: no secret ever goes over it.
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

_MAGIC = b"slurmtrain/1"
_NONCE = 16
_DIGEST = 32
# A message of 1,000 nodes has a few MB; nobody without the secret can make us read one at all.
_LIMIT = 1 << 26
_LENGTH = struct.Struct(">I")
# How long a stranger may take over its first words; no less than one of ours may need where a node is busy.
_HANDSHAKE_S = 30.0


class AuthenticationError(Exception):
    """The other side does not know the secret of this attempt."""


class ChannelClosed(Exception):
    """The connection has ended; the message says how."""


class Channel:
    """One authenticated connection. ``sent`` counts messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, serving: bool
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._mine, self._theirs = (b"s", b"c") if serving else (b"c", b"s")
        self.sent = self._received = 0

    @property
    def here(self) -> str:
        """This side's address."""
        return _address(self._writer, "sockname")

    @property
    def there(self) -> str:
        """The other side's address, as it looks from here."""
        return _address(self._writer, "peername")

    async def send(self, message: object) -> None:
        """Send one message of JSON's types. Raises Closed."""
        text = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._writer.write(_LENGTH.pack(len(text)) + text + self._sign(self._mine, self.sent, text))
            self.sent += 1
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed(_describe_error(error)) from error

    async def receive(self) -> Any:
        """The next message. Raises Closed, also for one that is not signed as it should be."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _LIMIT:
                raise ChannelClosed("it sent something that is no message")
            text = await self._reader.readexactly(length)
            signature = await self._reader.readexactly(_DIGEST)
        except asyncio.IncompleteReadError as error:
            raise ChannelClosed("it closed the connection") from error
        except OSError as error:
            raise ChannelClosed(_describe_error(error)) from error
        if not hmac.compare_digest(signature, self._sign(self._theirs, self._received, text)):
            raise ChannelClosed("it sent a message with a wrong signature")
        self._received += 1
        return json.loads(text)

    def close(self) -> None:
        """End the connection; what has been sent still arrives."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()

    def _sign(self, side: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + text, "sha256")


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Channel:
    """The serving side's part of getting to know each other. Raises Stranger; the connection is then closed."""
    mine = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            writer.write(_MAGIC + mine)
            theirs = await reader.readexactly(_NONCE)
            proof = await reader.readexactly(_DIGEST)
            if not hmac.compare_digest(proof, _proof(secret, b"c", mine, theirs)):
                raise AuthenticationError("it does not know the secret of this attempt")
            writer.write(_proof(secret, b"s", mine, theirs))
            await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        _abort(writer)
        raise AuthenticationError("it did not say who it is") from error
    except AuthenticationError:
        _abort(writer)
        raise
    return Channel(reader, writer, _proof(secret, b"k", mine, theirs), serving=True)


async def connect(address: str, port: int, secret: bytes, source: str | None = None) -> Channel:
    """Connect to an agent. Raises OSError where nobody answers, Stranger where somebody else does.

    It takes as long as the kernel allows: the caller bounds it. ``source``: the address to connect from.
    """
    try:
        reader, writer = await asyncio.open_connection(address, port, local_addr=(source, 0) if source else None)
    except OSError as error:
        if error.errno is None:
            raise
        # Its message, instead of asyncio's.
        raise OSError(error.errno, os.strerror(error.errno)) from error
    mine = secrets.token_bytes(_NONCE)
    try:
        greeting = await reader.readexactly(len(_MAGIC) + _NONCE)
        if not greeting.startswith(_MAGIC):
            raise AuthenticationError("something else listens there")
        theirs = greeting[len(_MAGIC) :]
        writer.write(mine + _proof(secret, b"c", theirs, mine))
        proof = await reader.readexactly(_DIGEST)
        if not hmac.compare_digest(proof, _proof(secret, b"s", theirs, mine)):
            raise AuthenticationError("it does not know the secret of this attempt")
    except asyncio.IncompleteReadError as error:
        _abort(writer)
        raise AuthenticationError("it is none of this attempt's, or closed the connection") from error
    except BaseException:
        _abort(writer)
        raise
    return Channel(reader, writer, _proof(secret, b"k", theirs, mine), serving=False)


def _proof(secret: bytes, side: bytes, served: bytes, connected: bytes) -> bytes:
    return hmac.digest(secret, side + served + connected, "sha256")


def _abort(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        writer.transport.abort()


def _address(writer: asyncio.StreamWriter, which: str) -> str:
    """Without the prefix that an IPv4 address has on a socket for both families, and without a scope."""
    name = str(writer.get_extra_info(which)[0])
    return name.removeprefix("::ffff:").partition("%")[0]


def _describe_error(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
