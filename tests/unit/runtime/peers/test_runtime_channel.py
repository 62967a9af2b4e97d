"""Messages between agents arrive unchanged, once, in order, and from nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from helpers.simulated_preflight import Proxy
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.runtime.peers import channel
from slurmtrain.runtime.peers.channel import AuthenticationError, Channel, ChannelClosed, accept, connect
from slurmtrain.runtime.preflight.ports import listen_anywhere

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))


class Server:
    """A server on this machine; ``results`` has what became of each connection to it, in the order of their ends."""

    def __init__(self) -> None:
        self.port = 0
        self.results: asyncio.Queue[Any] = asyncio.Queue()


@contextlib.asynccontextmanager
async def serving(answer: Callable[..., Coroutine[Any, Any, Any]]) -> AsyncIterator[Server]:
    """Serve connections with ``answer``; what it returns or raises becomes a result."""
    server = Server()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server.results.put_nowait(await answer(reader, writer))
        except (AuthenticationError, ChannelClosed, OSError, EOFError) as error:
            server.results.put_nowait(error)

    listener = await asyncio.start_server(note, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def accepting(secret: bytes = SECRET) -> Callable[..., Coroutine[Any, Any, Channel]]:
    return lambda reader, writer: accept(reader, writer, secret)


async def connect_pair(secret: bytes = SECRET) -> tuple[Channel, Channel]:
    """Both ends of a connection: the accepting one and the connecting one."""
    async with serving(accepting(secret)) as server:
        connected = await connect("127.0.0.1", server.port, secret)
        return await server.results.get(), connected


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """All that arrives until the other side closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


# --- authenticated connections ----------------------------------------------------------------------------------


async def test_messages_go_both_ways_and_are_counted() -> None:
    accepted, connected = await connect_pair()
    await connected.send({"node": 3})
    await connected.send("x" * 300_000)
    assert await accepted.receive() == {"node": 3}
    assert await accepted.receive() == "x" * 300_000
    await accepted.send([None, 1.5, "ä"])
    assert await connected.receive() == [None, 1.5, "ä"]
    assert (accepted.sent, connected.sent) == (1, 2)
    accepted.close()
    connected.close()


async def test_sending_to_a_side_that_has_died_or_over_a_closed_connection_raises() -> None:
    accepted, connected = await connect_pair()
    accepted._writer.transport.abort()
    with pytest.raises(ChannelClosed, match=r"Connection reset by peer|Broken pipe|Connection lost"):
        while True:
            await connected.send("x" * 100_000)
    _, connected = await connect_pair()
    connected.close()
    await connected._writer.wait_closed()
    with pytest.raises(ChannelClosed, match=r"^Connection lost$"):
        await connected.send("too late")


async def test_addresses_are_written_in_their_own_family() -> None:
    with listen_anywhere(0) as listener:
        connect_pair: asyncio.Queue[Channel] = asyncio.Queue()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connect_pair.put_nowait(await accept(reader, writer, SECRET))

        server = await asyncio.start_server(answer, sock=listener)
        connected = await connect("127.0.0.1", listener.getsockname()[1], SECRET, "127.4.0.7")
        accepted = await connect_pair.get()
        assert (accepted.local_address, accepted.remote_address) == ("127.0.0.1", "127.4.0.7")
        assert (connected.local_address, connected.remote_address) == ("127.4.0.7", "127.0.0.1")
        accepted.close()
        connected.close()
        server.close()


# --- failed handshakes -------------------------------------------------------------------------------------------


async def test_sides_with_different_secrets_refuse_each_other() -> None:
    async with serving(accepting()) as server:
        with pytest.raises(AuthenticationError, match="not an agent of this attempt"):
            await connect("127.0.0.1", server.port, OTHER)
        assert str(await server.results.get()) == "it does not know the secret of this attempt"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: node0\r\nUser-Agent: something\r\n\r\n", id="another-protocol"),
        pytest.param(bytes(16 + 32), id="nothing-but-zeros"),
        pytest.param(b"x" * 100_000, id="too-much"),
    ],
)
async def test_a_connection_that_does_not_speak_the_protocol_is_refused(sent: bytes) -> None:
    async with serving(accepting()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert isinstance(await server.results.get(), AuthenticationError)
        # Its own nonce is all that the server has sent.
        assert len(await read_to_end(reader)) <= len(b"slurmtrain/1") + 16
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"half a greeting"])
@pytest.mark.parametrize("disconnects", [True, False])
async def test_an_incomplete_handshake_is_refused(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, disconnects: bool
) -> None:
    if not disconnects:
        monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.05)

    async with serving(accepting()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        if disconnects:
            writer.write_eof()
        refused = await server.results.get()
        assert str(refused) == "it did not say who it is"
        await read_to_end(reader)
        writer.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6 Debian-3\r\nand more of that", "something else listens there"),
        (b"", "not an agent of this attempt, or closed"),
        (b"slurmtrain/1" + bytes(8), "not an agent of this attempt, or closed"),
        (b"slurmtrain/1" + bytes(16) + bytes(32), "does not know the secret"),
    ],
)
async def test_a_service_that_does_not_know_the_secret_is_refused(sent: bytes, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        if len(sent) > len(b"slurmtrain/1") + 16:
            await reader.readexactly(16 + 32)
        writer.close()

    async with serving(answer) as server:
        with pytest.raises(AuthenticationError, match=reason):
            await connect("127.0.0.1", server.port, SECRET)


async def test_a_service_that_echoes_the_handshake_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"slurmtrain/1" + bytes(16))
        nonce, proof = await reader.readexactly(16), await reader.readexactly(32)
        writer.write(proof + nonce)
        await read_to_end(reader)
        writer.close()

    async with serving(answer) as server:
        with pytest.raises(AuthenticationError, match="does not know the secret"):
            await connect("127.0.0.1", server.port, SECRET)


async def test_a_cancelled_handshake_closes_the_connection() -> None:
    async with serving(lambda reader, writer: read_to_end(reader)) as server:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connect("127.0.0.1", server.port, SECRET), 0.05)
        assert await server.results.get() == b""


# --- eavesdroppers ---------------------------------------------------------------------------------------------


def test_the_secret_is_never_sent() -> None:
    async def scenario() -> bytes:
        async with serving(accepting()) as server, Proxy(server.port) as proxy:
            connected = await connect("127.0.0.1", proxy.port, SECRET)
            accepted = await server.results.get()
            await connected.send({"host": "node1"})
            assert await accepted.receive() == {"host": "node1"}
            await accepted.send("words")
            assert await connected.receive() == "words"
            key = accepted._key
            accepted.close()
            connected.close()
        traffic = bytes(proxy.forth + proxy.back)
        assert b'{"host":"node1"}' in traffic
        assert key not in traffic
        return traffic

    traffic = asyncio.run(scenario())
    for length in (8, 32):
        assert SECRET[:length] not in traffic
        assert SECRET.hex()[:length].encode() not in traffic


async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, recorded: bytes) -> None:
    """Answer whoever connects with these bytes."""
    writer.write(recorded)
    await read_to_end(reader)
    writer.close()


async def test_a_recorded_connection_can_be_replayed_to_neither_side() -> None:
    async with serving(accepting()) as server, Proxy(server.port) as proxy:
        connected = await connect("127.0.0.1", proxy.port, SECRET)
        accepted = await server.results.get()
        await connected.send({"topic": "stopped", "payload": "SIGTERM"})
        accepted.close()
        connected.close()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(bytes(proxy.forth))
        assert str(await server.results.get()) == "it does not know the secret of this attempt"
        writer.close()
    async with serving(lambda reader, writer: replay(reader, writer, bytes(proxy.back))) as server:
        with pytest.raises(AuthenticationError, match="does not know the secret"):
            await connect("127.0.0.1", server.port, SECRET)


# --- altered messages ------------------------------------------------------------------------------------------


class Written:
    """A writer that keeps all messages."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.frames.append(data)

    async def drain(self) -> None:
        """Everything is written at once."""

    def close(self) -> None:
        """Nothing to close."""


async def send_frames(*messages: object, accepted: bool = False) -> list[bytes]:
    """The bytes of these messages, as one side sends them."""
    written = Written()
    channel = Channel(asyncio.StreamReader(), written, b"key", accepted=accepted)  # type: ignore[arg-type]
    for message in messages:
        await channel.send(message)
    return written.frames


async def receive_frames(*data: bytes, accepted: bool = True) -> list[Any]:
    """The messages that the other side reads from these bytes, and the error that follows."""
    reader = asyncio.StreamReader()
    for piece in data:
        reader.feed_data(piece)
    reader.feed_eof()
    channel = Channel(reader, Written(), b"key", accepted=accepted)  # type: ignore[arg-type]
    messages: list[Any] = []
    try:
        while True:
            messages.append(await channel.receive())
    except ChannelClosed as closed_error:
        return [*messages, str(closed_error)]


END, WRONG = "it closed the connection", "it sent a message with a wrong signature"
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.lists(_JSON, max_size=5))
def test_messages_arrive_as_they_were_sent_and_in_order(messages: list[Any]) -> None:
    frames = asyncio.run(send_frames(*messages))
    assert asyncio.run(receive_frames(*frames)) == [*messages, END]


@settings(deadline=None)
@given(st.data())
def test_a_message_of_which_any_bit_has_changed_is_refused(data: st.DataObject) -> None:
    first, second = asyncio.run(send_frames({"node": 1}, {"node": 2}))
    # Beyond the length: with another length, other bytes are signed.
    at = data.draw(st.integers(4 * 8, len(second) * 8 - 1))
    altered = bytearray(second)
    altered[at // 8] ^= 1 << at % 8
    assert asyncio.run(receive_frames(first, bytes(altered))) == [{"node": 1}, WRONG]


async def test_repeated_swapped_missing_incomplete_and_returned_messages_are_refused() -> None:
    first, second = await send_frames("one", "two")
    assert await receive_frames(first, second) == ["one", "two", END]
    assert await receive_frames(first, first) == ["one", WRONG]
    assert await receive_frames(second, first) == [WRONG]
    assert await receive_frames(second) == [WRONG]
    for length in (0, 2, 4, 6, 20):
        assert await receive_frames(first[:length]) == [END]
    # Back to its sender.
    assert await receive_frames(first, accepted=False) == [WRONG]
    (frame,) = await send_frames("one", accepted=True)
    assert await receive_frames(frame, accepted=True) == [WRONG]
    assert await receive_frames(frame, accepted=False) == ["one", END]
    # Too long, which is noticed before it is read.
    for length in (channel.most_bytes(1) + 1, 2**32 - 1):
        frames = await receive_frames(struct.pack(">I", length) + first[4:])
        assert frames == ["it sent something that is not a message"]
