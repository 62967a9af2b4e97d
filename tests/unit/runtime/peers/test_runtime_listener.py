"""Strangers at a listening socket: connections that never say who they are, or say it wrongly, by the thousand."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runtime.peers import channel
from slurmtrain.runtime.peers.channel import Channel, ChannelClosed, PeerListener, Refusals, connect
from slurmtrain.runtime.preflight.ports import listen, listen_anywhere

SECRET, OTHER = bytes(32), bytes(range(32))
LONG_S = 60.0
NODES = 2
MOST_WAITING = channel._WAITING + channel._WAITING_PER_NODE * NODES


class Service:
    """A listener that answers every message with the same one."""

    def __init__(self, listener: socket.socket) -> None:
        self.refusals = Refusals()
        self.port = int(listener.getsockname()[1])
        self.peers = PeerListener(listener, SECRET, NODES, self._answer, self.refusals)
        self.peers.open()

    async def _answer(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                await channel.send(await channel.receive())

    async def until(self, refused: int) -> None:
        """Wait until this many connections have been refused."""
        async with asyncio.timeout(LONG_S):
            while self.refusals.count < refused:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def service(listener: socket.socket | None = None) -> AsyncIterator[Service]:
    running = Service(listener or listen("127.0.0.1", 0))
    try:
        yield running
    finally:
        await running.peers.close()


@contextlib.asynccontextmanager
async def strangers(port: int, count: int, source: str = "127.0.0.1") -> AsyncIterator[list[socket.socket]]:
    """Connections that say nothing."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.bind((source, 0))
            await loop.sock_connect(connection, ("127.0.0.1", port))
            connections.append(connection)
        yield connections


async def talk(port: int, source: str | None = None) -> None:
    """Connect as a node of the attempt, and exchange a message."""
    connected = await connect("127.0.0.1", port, SECRET, source)
    await connected.send("hello")
    assert await connected.receive() == "hello"
    connected.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is refused for being slow."""
    monkeypatch.setattr(channel, "_HANDSHAKE_S", LONG_S)


@pytest.mark.usefixtures("patient")
def test_nodes_get_through_while_more_strangers_wait_than_the_process_could_have_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 10 * MOST_WAITING

    async def scenario() -> None:
        # The strangers' ends of the connections are in this process too: it may open those, and a few more.
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + count + 2 * MOST_WAITING, hard))
        async with service() as running, strangers(running.port, count):
            await talk(running.port, "127.4.0.1")
            assert len(running.peers.tasks) <= MOST_WAITING + 1

    try:
        asyncio.run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("patient")
async def test_the_oldest_connection_of_the_busiest_address_makes_room() -> None:
    async with service() as running, strangers(running.port, 1, "127.4.0.7") as [other]:
        loop = asyncio.get_running_loop()
        async with strangers(running.port, MOST_WAITING + 20) as connections:
            await running.until(refused=21)
            for dropped in connections[:21]:
                # The greeting, then the end.
                with contextlib.suppress(ConnectionResetError):
                    while await loop.sock_recv(dropped, 100):
                        pass
            assert running.refusals.by_address == {"127.0.0.1": 21}
            # It has waited longest, but from an address with few connections.
            assert len(await loop.sock_recv(other, 100)) == len(b"slurmtrain/1") + 16
            await talk(running.port)


async def test_a_connection_that_says_nothing_is_ended_after_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert channel._HANDSHAKE_S <= 5
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.05)

    async with service() as running, strangers(running.port, 3):
        await running.until(refused=3)
        async with asyncio.timeout(LONG_S):
            while running.peers.tasks:
                await asyncio.sleep(0.001)


def test_refusals_are_logged_the_first_time_and_then_every_tenfold_number(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(1, 101):
        refusals.add(f"10.0.0.{number}", "it does not know the secret of this attempt")
    assert caplog.messages == [
        "refused a connection from 10.0.0.1: it does not know the secret of this attempt",
        "refused a connection from 10.0.0.10: it does not know the secret of this attempt (10 refused so far)",
        "refused a connection from 10.0.0.100: it does not know the secret of this attempt (100 refused so far)",
    ]
    assert (refusals.count, len(refusals.by_address)) == (100, 16)


async def test_an_ipv4_address_is_named_as_such_on_a_socket_for_both_families() -> None:
    async with service(listen_anywhere(0)) as running:
        with pytest.raises(Exception, match="not an agent of this attempt"):
            await connect("127.0.0.1", running.port, OTHER, "127.4.0.9")
        await running.until(refused=1)
        assert running.refusals.by_address == {"127.4.0.9": 1}


async def test_a_listener_that_is_closed_ends_all_connections_and_listens_no_more() -> None:
    async with service() as running:
        connected = await connect("127.0.0.1", running.port, SECRET)
        await connected.send("hello")
        assert await connected.receive() == "hello"
        async with strangers(running.port, 5):
            await running.peers.close()
            with pytest.raises(ChannelClosed):
                await connected.receive()
            with pytest.raises(ConnectionRefusedError):
                await connect("127.0.0.1", running.port, SECRET)
        connected.close()


async def test_a_listener_opens_again_after_the_system_had_no_room_for_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_PAUSE_S", 0.001)

    class FullAtFirst(socket.socket):
        failures = 3

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener = FullAtFirst(fileno=listen("127.0.0.1", 0).detach())
    async with service(listener) as running:
        await talk(running.port)
    assert listener.failures == 0
