"""What agents say to each other: to nobody else, unchanged, once, and in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from helpers.simulated_preflight import Middleman, vacant
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.runtime.preflight import channel
from slurmtrain.runtime.preflight.channel import AuthenticationError, Channel, ChannelClosed, accept, connect
from slurmtrain.runtime.preflight.sockets import listen_anywhere

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """A socket on this machine; ``met`` is what came of each connection to it, in the order of its end."""

    def __init__(self) -> None:
        self.port = 0
        self.met: asyncio.Queue[Any] = asyncio.Queue()


@contextlib.asynccontextmanager
async def serving(answer: Callable[..., Coroutine[Any, Any, Any]]) -> AsyncIterator[Server]:
    """Answer connections with this; what it returns or raises can be asked for."""
    server = Server()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server.met.put_nowait(await answer(reader, writer))
        except (AuthenticationError, ChannelClosed, OSError, EOFError) as error:
            server.met.put_nowait(error)

    listener = await asyncio.start_server(note, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def greeting(secret: bytes = SECRET) -> Callable[..., Coroutine[Any, Any, Channel]]:
    return lambda reader, writer: accept(reader, writer, secret)


async def met(secret: bytes = SECRET) -> tuple[Channel, Channel]:
    """Two sides that know each other: the one that served and the one that connected."""
    async with serving(greeting(secret)) as server:
        there = await connect("127.0.0.1", server.port, secret)
        return await server.met.get(), there


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other side has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


# --- those who know each other ----------------------------------------------------------------------------------


def test_two_sides_that_know_the_secret_talk_both_ways_and_count() -> None:
    async def talk() -> None:
        here, there = await met()
        await there.send({"node": 3})
        await there.send("x" * 300_000)
        assert await here.receive() == {"node": 3}
        assert await here.receive() == "x" * 300_000
        await here.send([None, 1.5, "ä"])
        assert await there.receive() == [None, 1.5, "ä"]
        assert (here.sent, there.sent) == (1, 2)
        here.close()
        there.close()

    asyncio.run(talk())


def test_what_was_sent_before_the_end_still_arrives() -> None:
    async def talk() -> None:
        here, there = await met()
        await here.send("x" * 300_000)
        here.close()
        assert await there.receive() == "x" * 300_000
        with pytest.raises(ChannelClosed, match="it closed the connection"):
            await there.receive()
        there.close()

    asyncio.run(talk())


def test_a_side_that_is_gone_is_noticed_by_the_one_that_sends() -> None:
    async def talk() -> None:
        here, there = await met()
        here._writer.transport.abort()
        with pytest.raises(ChannelClosed, match=r"Connection reset by peer|Broken pipe|Connection lost"):
            while True:
                await there.send("x" * 100_000)

    asyncio.run(talk())


def test_nothing_can_be_sent_over_a_connection_that_this_side_has_ended() -> None:
    async def talk() -> None:
        _, there = await met()
        there.close()
        await there._writer.wait_closed()
        with pytest.raises(ChannelClosed, match=r"^Connection lost$"):
            await there.send("too late")

    asyncio.run(talk())


def test_a_connection_that_is_cut_is_closed_in_words() -> None:
    async def talk() -> None:
        here, there = await met()
        here._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here._writer.transport.abort()
        with pytest.raises(ChannelClosed, match="Connection reset by peer"):
            await there.receive()

    asyncio.run(talk())


def test_addresses_are_as_they_are_written_in_their_own_family() -> None:
    async def talk() -> None:
        with listen_anywhere(0) as listener:
            met: asyncio.Queue[Channel] = asyncio.Queue()

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                met.put_nowait(await accept(reader, writer, SECRET))

            server = await asyncio.start_server(answer, sock=listener)
            there = await connect("127.0.0.1", listener.getsockname()[1], SECRET, "127.4.0.7")
            here = await met.get()
            assert (here.here, here.there) == ("127.0.0.1", "127.4.0.7")
            assert (there.here, there.there) == ("127.4.0.7", "127.0.0.1")
            here.close()
            there.close()
            server.close()

    asyncio.run(talk())


# --- strangers --------------------------------------------------------------------------------------------------


def test_sides_with_different_secrets_refuse_each_other() -> None:
    async def talk() -> None:
        async with serving(greeting()) as server:
            with pytest.raises(AuthenticationError, match="none of this attempt"):
                await connect("127.0.0.1", server.port, OTHER)
            assert str(await server.met.get()) == "it does not know the secret of this attempt"

    asyncio.run(talk())


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: node0\r\nUser-Agent: something\r\n\r\n", id="another-protocol"),
        pytest.param(bytes(16 + 32), id="nothing-but-zeros"),
        pytest.param(b"x" * 100_000, id="too-much"),
    ],
)
def test_a_stranger_who_talks_at_random_is_sent_away(said: bytes) -> None:
    async def talk() -> None:
        async with serving(greeting()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            assert isinstance(await server.met.get(), AuthenticationError)
            # Its own nonce is all that the server has said.
            assert len(await closed(reader)) <= len(b"slurmtrain/1") + 16
            writer.close()

    asyncio.run(talk())


@pytest.mark.parametrize("said", [b"", b"half a greeting"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_who_does_not_say_enough_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: bytes, leaves: bool
) -> None:
    if not leaves:
        monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.05)

    async def talk() -> None:
        async with serving(greeting()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            if leaves:
                writer.write_eof()
            refused = await server.met.get()
            assert str(refused) == "it did not say who it is"
            await closed(reader)
            writer.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6 Debian-3\r\nand more of that", "something else listens there"),
        (b"", "none of this attempt's, or closed"),
        (b"slurmtrain/1" + bytes(8), "none of this attempt's, or closed"),
        (b"slurmtrain/1" + bytes(16) + bytes(32), "does not know the secret"),
    ],
)
def test_a_service_that_does_not_know_the_secret_is_a_stranger(said: bytes, why: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        if len(said) > len(b"slurmtrain/1") + 16:
            await reader.readexactly(16 + 32)
        writer.close()

    async def talk() -> None:
        async with serving(answer) as server:
            with pytest.raises(AuthenticationError, match=why):
                await connect("127.0.0.1", server.port, SECRET)

    asyncio.run(talk())


def test_a_service_that_gives_back_what_it_was_sent_proves_nothing() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"slurmtrain/1" + bytes(16))
        nonce, proof = await reader.readexactly(16), await reader.readexactly(32)
        writer.write(proof + nonce)
        await closed(reader)
        writer.close()

    async def talk() -> None:
        async with serving(answer) as server:
            with pytest.raises(AuthenticationError, match="does not know the secret"):
                await connect("127.0.0.1", server.port, SECRET)

    asyncio.run(talk())


def test_one_who_gives_up_on_a_silent_service_leaves_it() -> None:
    async def talk() -> None:
        async with serving(lambda reader, writer: closed(reader)) as server:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connect("127.0.0.1", server.port, SECRET), 0.05)
            assert await server.met.get() == b""

    asyncio.run(talk())


def test_nobody_at_all_is_an_error_of_the_system() -> None:
    async def talk() -> None:
        with vacant("127.0.0.1") as port:
            with pytest.raises(ConnectionRefusedError) as refused:
                await connect("127.0.0.1", port, SECRET)
            with pytest.raises(OSError) as unknown:
                await connect("127.0.0.1", port, SECRET, "192.0.2.7")
        assert refused.value.strerror == "Connection refused"
        assert unknown.value.strerror == "Cannot assign requested address"

    asyncio.run(talk())


# --- those in between -------------------------------------------------------------------------------------------


def test_what_goes_over_the_wire_holds_nothing_of_the_secret() -> None:
    async def talk() -> bytes:
        async with serving(greeting()) as server, Middleman(server.port) as middle:
            there = await connect("127.0.0.1", middle.port, SECRET)
            here = await server.met.get()
            await there.send({"host": "node1"})
            assert await here.receive() == {"host": "node1"}
            await here.send("words")
            assert await there.receive() == "words"
            key = here._key
            here.close()
            there.close()
        seen = bytes(middle.forth + middle.back)
        assert b'{"host":"node1"}' in seen
        assert key not in seen
        return seen

    seen = asyncio.run(talk())
    for length in (8, 32):
        assert SECRET[:length] not in seen
        assert SECRET.hex()[:length].encode() not in seen


def test_a_conversation_that_was_heard_cannot_be_repeated_to_the_host() -> None:
    async def talk() -> None:
        async with serving(greeting()) as server, Middleman(server.port) as middle:
            there = await connect("127.0.0.1", middle.port, SECRET)
            await server.met.get()
            await there.send({"topic": "bye", "words": "SIGTERM"})
            there.close()
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(bytes(middle.forth))
            assert str(await server.met.get()) == "it does not know the secret of this attempt"
            writer.close()

    asyncio.run(talk())


def test_a_host_that_was_heard_cannot_be_played_to_a_guest() -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(heard[0])
        await closed(reader)
        writer.close()

    async def talk() -> None:
        async with serving(greeting()) as server, Middleman(server.port) as middle:
            there = await connect("127.0.0.1", middle.port, SECRET)
            here = await server.met.get()
            here.close()
            there.close()
        heard.append(bytes(middle.back))
        async with serving(answer) as server:
            with pytest.raises(AuthenticationError, match="does not know the secret"):
                await connect("127.0.0.1", server.port, SECRET)

    asyncio.run(talk())


# --- messages that were tampered with ---------------------------------------------------------------------------


class Written:
    """A writer that keeps what it is given, one message an item."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.frames.append(data)

    async def drain(self) -> None:
        """Nothing is in the way."""

    def close(self) -> None:
        """Nothing is open."""


async def frames(*messages: object, serving: bool = False) -> list[bytes]:
    """How one side sends these messages."""
    written = Written()
    channel = Channel(asyncio.StreamReader(), written, b"key", serving=serving)  # type: ignore[arg-type]
    for message in messages:
        await channel.send(message)
    return written.frames


async def received(*data: bytes, serving: bool = True) -> list[Any]:
    """What the other side makes of these bytes, until the end or the first problem."""
    reader = asyncio.StreamReader()
    for each in data:
        reader.feed_data(each)
    reader.feed_eof()
    channel = Channel(reader, Written(), b"key", serving=serving)  # type: ignore[arg-type]
    heard: list[Any] = []
    try:
        while True:
            heard.append(await channel.receive())
    except ChannelClosed as end:
        return [*heard, str(end)]


END, WRONG = "it closed the connection", "it sent a message with a wrong signature"
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.lists(_JSON, max_size=5))
def test_messages_arrive_as_they_were_sent_and_in_order(messages: list[Any]) -> None:
    async def talk() -> list[Any]:
        return await received(*(await frames(*messages)))

    assert asyncio.run(talk()) == [*messages, END]


@settings(deadline=None)
@given(st.data())
def test_a_message_of_which_any_bit_has_changed_is_refused(data: st.DataObject) -> None:
    async def talk() -> None:
        first, second = await frames({"node": 1}, {"node": 2})
        # Beyond the length: with another length, other bytes are signed.
        at = data.draw(st.integers(4 * 8, len(second) * 8 - 1))
        changed = bytearray(second)
        changed[at // 8] ^= 1 << at % 8
        assert await received(first, bytes(changed)) == [{"node": 1}, WRONG]

    asyncio.run(talk())


def test_messages_that_are_repeated_swapped_or_left_out_are_refused() -> None:
    async def talk() -> None:
        one, two = await frames("one", "two")
        assert await received(one, two) == ["one", "two", END]
        assert await received(one, one) == ["one", WRONG]
        assert await received(two, one) == [WRONG]
        assert await received(two) == [WRONG]

    asyncio.run(talk())


def test_a_side_cannot_be_made_to_hear_its_own_words() -> None:
    async def talk() -> None:
        (said,) = await frames("one")
        assert await received(said, serving=False) == [WRONG]
        (said,) = await frames("one", serving=True)
        assert await received(said, serving=True) == [WRONG]
        assert await received(said, serving=False) == ["one", END]

    asyncio.run(talk())


def test_the_same_words_are_signed_anew_each_time() -> None:
    async def talk() -> None:
        one, again = await frames("one", "one")
        assert one[:-32] == again[:-32]
        assert one != again

    asyncio.run(talk())


def test_a_length_that_no_message_has_is_refused_before_it_is_read() -> None:
    async def talk() -> None:
        (said,) = await frames("one")
        for length in (channel._LIMIT + 1, 2**32 - 1):
            assert await received(struct.pack(">I", length) + said[4:]) == ["it sent something that is no message"]

    asyncio.run(talk())


@pytest.mark.parametrize("length", [0, 2, 4, 6, 20])
def test_half_a_message_is_none(length: int) -> None:
    async def talk() -> None:
        (said,) = await frames("one")
        assert await received(said[:length]) == [END]

    asyncio.run(talk())
