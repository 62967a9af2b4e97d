"""How a node finds node 0, and what it does where it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.connected_nodes import (
    LONG_S,
    OTHER,
    SECRET,
    Clock,
    listening_coordinator,
    wait_for_disconnects,
    wait_until_received,
)
from helpers.simulated_preflight import vacant

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.peers.channel import AuthenticationError, Channel, ChannelClosed, connect
from slurmtrain.runtime.preflight import connections
from slurmtrain.runtime.preflight.connections import Endpoint, ParticipantConnections, PeerLost, connect_to_coordinator
from slurmtrain.runtime.preflight.ports import listen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connections, "time", clock)
    return clock


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


def test_an_endpoint_that_becomes_known_later_is_tried_too(
    monkeypatch: pytest.MonkeyPatch, unused_endpoint: Endpoint
) -> None:
    monkeypatch.setattr(connections, "_DISCOVERY_POLL_S", 0.01)

    async def scenario() -> None:
        async with listening_coordinator(2) as (_, endpoint):
            first = [unused_endpoint]
            calls = 0

            def endpoints() -> Sequence[Endpoint]:
                nonlocal calls
                calls += 1
                return [*first, endpoint] if calls > 3 else first

            participant, _ = await connect_to_coordinator(endpoints, 1, LONG_S)
            assert calls > 3
            await wait_until_received(participant)
            await participant.close()

    asyncio.run(scenario())


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


async def test_a_cancelled_search_leaves_no_task_behind(
    monkeypatch: pytest.MonkeyPatch, unused_endpoint: Endpoint
) -> None:
    failed = watch_for_failure(monkeypatch)

    silence = listen("127.0.0.1", 0)
    endpoints = [Endpoint("127.0.0.1", silence.getsockname()[1], SECRET), unused_endpoint]
    finding = asyncio.create_task(connect_to_coordinator(lambda: endpoints, 1, LONG_S))
    await failed.wait()
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    silence.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


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
