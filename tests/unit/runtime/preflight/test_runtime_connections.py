"""The connections between node 0 and all others: reports and commands, lost peers, and how node 0 is found."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.simulated_preflight import vacant

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.channel import AuthenticationError, Channel, ChannelClosed, accept, connect
from slurmtrain.runtime.preflight import connections
from slurmtrain.runtime.preflight.connections import (
    CoordinatorConnection,
    Endpoint,
    ParticipantConnections,
    PeerLost,
    connect_to_coordinator,
)
from slurmtrain.runtime.preflight.ports import listen

SECRET, OTHER = bytes(32), bytes(range(32))


# Longer than any test: nothing here waits until it has passed.
LONG_S = 60.0


class Clock:
    """Replaces the monotonic clock of the connections: it runs by itself, and jumps on request."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@contextlib.asynccontextmanager
async def listening_coordinator(
    nodes: int, secret: bytes = SECRET, now: Callable[[], float] = time.time
) -> AsyncIterator[tuple[ParticipantConnections, Endpoint]]:
    """Node 0, and its endpoint."""
    coordinator, listener = ParticipantConnections(secret, nodes, now), listen("127.0.0.1", 0)
    await coordinator.listen(listener)
    try:
        yield coordinator, Endpoint("127.0.0.1", listener.getsockname()[1], secret)
    finally:
        await coordinator.close()


async def wait_until_received(participant: CoordinatorConnection) -> None:
    """Wait until node 0 has received everything that this participant has sent: it answers in order."""
    await participant.exchange_clock_stamps(LONG_S)


async def wait_for_disconnects(coordinator: ParticipantConnections, remaining: int) -> None:
    """Wait until node 0 has noticed the end of all but this many connections."""
    assert coordinator._gate is not None
    while len(coordinator._gate.tasks) > remaining:
        await asyncio.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connections, "time", clock)
    return clock


async def connect_participant(
    endpoint: Endpoint, node: int, now: Callable[[], float] = time.time
) -> CoordinatorConnection:
    participant, _ = await connect_to_coordinator(lambda: [endpoint], node, LONG_S, now)
    return participant


async def connect_without_heartbeats(endpoint: Endpoint, node: int) -> Channel:
    """A participant that reports its number, and nothing more."""
    channel = await connect(endpoint.address, endpoint.port, endpoint.secret)
    await channel.send({"node": node})
    # The answer shows that the number has been read.
    await channel.send({"topic": "heartbeat", "payload": None})
    await channel.receive()
    return channel


# --- reports and commands ------------------------------------------------------------------------------------------


async def test_node_0_gathers_the_reports_of_all_and_commands_all_or_each() -> None:
    async with listening_coordinator(3) as (coordinator, endpoint):
        participant_2, participant_1 = (
            await connect_participant(endpoint, 2),
            await connect_participant(endpoint, 1),
        )
        await participant_2.report("join", "I am two")
        await participant_1.report("join", {"I am": 1})
        reports = await coordinator.gather("join", "I am node 0", LONG_S)
        assert list(reports.items()) == [(0, "I am node 0"), (1, {"I am": 1}), (2, "I am two")]
        await coordinator.broadcast("command", "go on")
        assert [await participant_1.receive("command", LONG_S), await participant_2.receive("command", LONG_S)] == [
            "go on",
            "go on",
        ]
        await coordinator.send_each("command", {0: "unused", 1: "for one", 2: "for two"})
        assert [await participant_2.receive("command", LONG_S), await participant_1.receive("command", LONG_S)] == [
            "for two",
            "for one",
        ]
        for participant in (participant_1, participant_2):
            await participant.close()


def test_clocks_are_compared_by_the_stamps_of_both_sides() -> None:
    async def scenario() -> tuple[float, ...]:
        async with listening_coordinator(2, now=lambda: 10.0) as (_, endpoint):
            participant = await connect_participant(endpoint, 1, lambda: 20.0)
            stamps = await participant.exchange_clock_stamps(LONG_S)
            await participant.close()
            return stamps

    assert asyncio.run(scenario()) == (20.0, 10.0, 10.0, 20.0)


# --- lost peers -------------------------------------------------------------------------------------------------


# The kernel resets a connection that is closed before all that has arrived was read.
CLOSED = "it closed the connection|Connection reset by peer"


@pytest.mark.parametrize(("signal", "reason"), [(None, CLOSED), ("SIGUSR2", "it was stopped")], ids=["died", "stopped"])
async def test_all_notice_that_node_0_disconnects_and_its_signal(signal: str | None, reason: str) -> None:
    async with listening_coordinator(3) as (coordinator, endpoint):
        participants = [await connect_participant(endpoint, 1), await connect_participant(endpoint, 2)]
        for participant in participants:
            await wait_until_received(participant)
        await coordinator.close(signal)
        for participant in participants:
            with pytest.raises(PeerLost, match=reason) as lost:
                await participant.receive("command", LONG_S)
            assert (lost.value.node, lost.value.signal) == (0, signal)
            with pytest.raises(PeerLost) as lost:
                while True:
                    await participant.report("join", None)
            assert (lost.value.node, lost.value.signal) == (0, signal)
            await participant.close()


async def test_the_last_command_arrives_whole_while_participants_still_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEARTBEAT_S", 0.001)
    payload = "x" * 3_000_000

    async def receive_and_leave(participant: CoordinatorConnection) -> str:
        payload: str = await participant.receive("command", LONG_S)
        await participant.close()
        return payload

    async with listening_coordinator(5) as (coordinator, endpoint):
        participants = [await connect_participant(endpoint, node) for node in range(1, 5)]
        for participant in participants:
            await wait_until_received(participant)
        tasks = [asyncio.create_task(receive_and_leave(participant)) for participant in participants]
        await coordinator.broadcast("command", payload)
        await coordinator.wait_for_disconnects(LONG_S)
        await coordinator.close()
        for task in tasks:
            assert await task == payload


async def test_a_participant_without_heartbeats_is_lost_and_one_with_heartbeats_is_not(clock: Clock) -> None:
    async with listening_coordinator(3) as (coordinator, endpoint):
        channel, participant = await connect_without_heartbeats(endpoint, 1), await connect_participant(endpoint, 2)
        clock.jump(connections.HEARTBEAT_TIMEOUT_S * 0.6)
        await wait_until_received(participant)
        waiting = asyncio.create_task(coordinator.gather("join", None, LONG_S * 60))
        clock.jump(connections.HEARTBEAT_TIMEOUT_S * 0.6)
        with pytest.raises(PeerLost) as lost:
            await waiting
        assert (lost.value.node, lost.value.signal) == (1, None)
        assert str(lost.value) == "it has not sent a heartbeat for 15 s"
        channel.close()
        await participant.close()


async def test_node_0_without_heartbeats_is_lost(clock: Clock) -> None:
    async def silent_endpoint(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ChannelClosed):
            channel = await accept(reader, writer, SECRET)
            while True:
                await channel.receive()

    server = await asyncio.start_server(silent_endpoint, "127.0.0.1", 0)
    participant = await connect_participant(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], SECRET), 1)
    waiting = asyncio.create_task(participant.receive("command", LONG_S * 60))
    await asyncio.sleep(0)
    clock.jump(connections.HEARTBEAT_TIMEOUT_S + 1)
    with pytest.raises(PeerLost) as lost:
        await waiting
    assert (lost.value.node, str(lost.value)) == (0, "it has not sent a heartbeat for 15 s")
    await participant.close()
    server.close()


# --- handshakes -------------------------------------------------------------------------------------------------


async def test_a_second_connection_of_a_participant_replaces_the_first() -> None:
    async with listening_coordinator(2) as (coordinator, endpoint):
        first = await connect_participant(endpoint, 1)
        await wait_until_received(first)
        second = await connect_participant(endpoint, 1)
        await wait_until_received(second)
        with pytest.raises(PeerLost, match=CLOSED):
            await first.receive("command", LONG_S)
        await second.report("join", "second")
        assert await coordinator.gather("join", None, LONG_S) == {0: None, 1: "second"}
        await coordinator.broadcast("command", "go on")
        assert await second.receive("command", LONG_S) == "go on"
        await first.close()
        await second.close()


@pytest.mark.parametrize("number", [0, 2, -1])
async def test_a_participant_with_a_number_that_no_node_has_is_refused(number: int) -> None:
    async with listening_coordinator(2) as (coordinator, endpoint):
        refused = await connect_participant(endpoint, number)
        with pytest.raises(PeerLost, match=CLOSED):
            await refused.receive("command", LONG_S)
        assert coordinator._refusals.count == 1
        participant = await connect_participant(endpoint, 1)
        await participant.report("join", None)
        assert await coordinator.gather("join", None, LONG_S) == {0: None, 1: None}
        await refused.close()
        await participant.close()


async def test_connections_that_fail_or_never_report_their_number_keep_no_participant_out() -> None:
    async with listening_coordinator(2) as (coordinator, endpoint):
        reader, writer = await asyncio.open_connection(endpoint.address, endpoint.port)
        writer.write(bytes(48))
        await reader.read()
        writer.close()
        (await connect(endpoint.address, endpoint.port, endpoint.secret)).close()
        participant = await connect_participant(endpoint, 1)
        await participant.report("join", None)
        assert await coordinator.gather("join", None, LONG_S) == {0: None, 1: None}
        assert coordinator._refusals.count >= 1
        assert participant.route == ("127.0.0.1", "127.0.0.1")
        await participant.close()


# --- finding node 0 ---------------------------------------------------------------------------------------------


@pytest.fixture
def unused_endpoint() -> Iterator[Endpoint]:
    """An endpoint at which nobody listens."""
    with vacant("127.0.0.1") as port:
        yield Endpoint("127.0.0.1", port, SECRET)


async def test_of_several_endpoints_the_one_that_works_is_found(unused_endpoint: Endpoint) -> None:
    async with (
        listening_coordinator(2) as (_, endpoint),
        listening_coordinator(2, OTHER) as (other, other_endpoint),
    ):
        refused = Endpoint(other_endpoint.address, other_endpoint.port, SECRET)
        endpoints = [unused_endpoint, refused, Endpoint(endpoint.address, endpoint.port, OTHER), endpoint]
        participant, secret = await connect_to_coordinator(lambda: endpoints, 1, LONG_S)
        assert secret == SECRET
        await wait_until_received(participant)
        assert not other._channels
        await participant.close()


def watch_for_failure(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that is set when an attempt to connect has failed."""
    failed = asyncio.Event()

    async def connecting(*endpoint: Any) -> Channel:
        try:
            return await connect(*endpoint)
        except OSError:
            failed.set()
            raise

    monkeypatch.setattr(connections, "connect", connecting)
    return failed


def test_an_endpoint_at_which_nobody_listens_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, unused_endpoint: Endpoint
) -> None:
    failed = watch_for_failure(monkeypatch)

    async def scenario() -> None:
        finding = asyncio.create_task(connect_to_coordinator(lambda: [unused_endpoint], 1, LONG_S))
        await failed.wait()
        coordinator = ParticipantConnections(SECRET, 2)
        await coordinator.listen(listen(unused_endpoint.address, unused_endpoint.port))
        participant, secret = await finding
        await wait_until_received(participant)
        assert (participant.route[1], secret) == (unused_endpoint.address, SECRET)
        await participant.close()
        await coordinator.close()

    asyncio.run(asyncio.wait_for(scenario(), LONG_S))


async def test_a_participant_keeps_one_connection_to_a_node_0_with_several_endpoints() -> None:
    async with listening_coordinator(2) as (coordinator, endpoint):
        # 127.0.0.0/8 is one machine; this one listens on one address of it, by two names.
        participant, _ = await connect_to_coordinator(
            lambda: [endpoint, Endpoint("::ffff:127.0.0.1", endpoint.port, SECRET)], 1, LONG_S
        )
        await participant.report("join", None)
        assert await coordinator.gather("join", None, LONG_S) == {0: None, 1: None}
        assert list(coordinator._channels) == [1]
        await wait_for_disconnects(coordinator, 1)
        await participant.close()


async def test_if_node_0_is_not_found_the_error_names_each_endpoint_and_its_problem(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, unused_endpoint: Endpoint
) -> None:
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT_S", 0.5)
    refusals: dict[int, Exception] = {}
    gave_up: set[int] = set()

    async def connect_and_note(address: str, port: int, secret: bytes) -> Channel:
        try:
            # On a busy machine, what has been refused once might take too long another time.
            if port in refusals:
                raise refusals[port]
            return await connect(address, port, secret)
        except (OSError, AuthenticationError) as error:
            refusals[port] = error
            raise
        except asyncio.CancelledError:
            gave_up.add(port)
            raise
        finally:
            if len(refusals) == 2 and gave_up - refusals.keys():
                clock.jump(LONG_S)

    monkeypatch.setattr(connections, "connect", connect_and_note)

    silence = listen("127.0.0.1", 0)
    async with listening_coordinator(2, OTHER) as (_, other):
        silent_endpoint = Endpoint("127.0.0.1", silence.getsockname()[1], SECRET)
        refused = Endpoint("127.0.0.1", other.port, SECRET)
        with pytest.raises(LaunchError) as error:
            await connect_to_coordinator(lambda: [unused_endpoint, silent_endpoint, refused], 1, LONG_S)
    silence.close()
    beginning, _, reasons = str(error.value).partition(": ")
    assert beginning == "node 0 could not be found within 60 s"
    assert set(reasons.split("; ")) == {
        f"127.0.0.1 port {unused_endpoint.port}: Connection refused",
        f"127.0.0.1 port {silent_endpoint.port} does not answer",
        f"127.0.0.1 port {refused.port}: it is not an agent of this attempt, or closed the connection",
    }


@pytest.mark.parametrize("turns", range(8))
async def test_a_search_can_be_cancelled_at_the_moment_at_which_an_attempt_ends(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    answers: list[asyncio.Future[None]] = []

    async def refuse(address: str, port: int, secret: bytes) -> Channel:
        answers.append(asyncio.get_running_loop().create_future())
        await answers[-1]
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(connections, "connect", refuse)
    finding = asyncio.create_task(connect_to_coordinator(lambda: [Endpoint("127.0.0.1", 1, SECRET)], 1, LONG_S))
    while not answers:
        await asyncio.sleep(0)
    answers[0].set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    finding.cancel()
    ended, _ = await asyncio.wait({finding}, timeout=LONG_S)
    assert ended == {finding}
    assert finding.cancelled()


def test_node_0_that_disconnects_as_soon_as_it_is_found_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SimpleNamespace):
        async def send(self, message: object) -> None:
            raise ChannelClosed("Connection reset by peer")

    async def scenario(address: str, port: int, secret: bytes) -> Broken:
        return Broken()

    monkeypatch.setattr(connections, "connect", scenario)
    with pytest.raises(PeerLost, match="Connection reset by peer") as lost:
        asyncio.run(connect_to_coordinator(lambda: [Endpoint("127.0.0.1", 1, SECRET)], 1, LONG_S))
    assert lost.value.node == 0
