"""Where agents meet: who is heard and told, who is late or gone, and how node 0 is found."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.simulated_preflight import vacant

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.preflight import connections
from slurmtrain.runtime.preflight.channel import AuthenticationError, Channel, ChannelClosed, connect
from slurmtrain.runtime.preflight.connections import (
    CoordinatorConnection,
    Endpoint,
    ParticipantConnections,
    PeerLost,
    ResponseTimeout,
    connect_to_coordinator,
)
from slurmtrain.runtime.preflight.sockets import listen

SECRET, OTHER = bytes(32), bytes(range(32))
# Longer than any test takes: nothing here waits for it to pass.
LONG_S = 60.0


class Clock:
    """Stands for the monotonic clock of the lobby; it goes on by itself, and jumps when told."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connections, "time", clock)
    return clock


@contextlib.asynccontextmanager
async def hosting(
    nodes: int, secret: bytes = SECRET, now: Callable[[], float] = time.time
) -> AsyncIterator[tuple[ParticipantConnections, Endpoint]]:
    """Node 0, and where it is."""
    host, listener = ParticipantConnections(secret, nodes, now), listen("127.0.0.1", 0)
    await host.listen(listener)
    try:
        yield host, Endpoint("127.0.0.1", listener.getsockname()[1], secret)
    finally:
        await host.close()


async def come(door: Endpoint, node: int, now: Callable[[], float] = time.time) -> CoordinatorConnection:
    guest, _ = await connect_to_coordinator(lambda: [door], node, LONG_S, now)
    return guest


async def heard(guest: CoordinatorConnection) -> None:
    """Node 0 has heard all that this guest has said: it answers in turn."""
    await guest.ask_clock(LONG_S)


async def parted(host: ParticipantConnections, left: int) -> None:
    """Node 0 has noticed the end of all connections but some."""
    while len(host._serving) > left:
        await asyncio.sleep(0.001)


async def silent(door: Endpoint, node: int) -> Channel:
    """A guest that says who it is, and nothing more."""
    channel = await connect(door.address, door.port, door.secret)
    await channel.send({"node": node})
    # The answer shows that the number has been read.
    await channel.send({"topic": "beat", "words": None})
    await channel.receive()
    return channel


# --- what is said -----------------------------------------------------------------------------------------------


def test_the_host_collects_what_all_say_and_answers_all_at_once() -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            two, one = await come(door, 2), await come(door, 1)
            await two.report("join", "I am two")
            await one.report("join", {"I am": 1})
            said = await host.gather("join", "I am the host", LONG_S)
            assert list(said.items()) == [(0, "I am the host"), (1, {"I am": 1}), (2, "I am two")]
            await host.tell("next", "go on")
            assert [await one.hear("next", LONG_S), await two.hear("next", LONG_S)] == ["go on", "go on"]
            await host.tell_each("next", {0: "unused", 1: "for one", 2: "for two"})
            assert [await two.hear("next", LONG_S), await one.hear("next", LONG_S)] == ["for two", "for one"]
            for guest in (one, two):
                await guest.close()

    asyncio.run(meet())


def test_what_is_said_before_it_is_asked_for_is_kept_by_topic_and_in_order() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            guest = await come(door, 1)
            await guest.report("later", "b")
            await guest.report("first", "a")
            assert await host.gather("first", None, LONG_S) == {0: None, 1: "a"}
            assert await host.gather("later", None, LONG_S) == {0: None, 1: "b"}
            for word in "xyz":
                await host.tell("next", word)
            await host.tell("other", "w")
            assert await guest.hear("other", LONG_S) == "w"
            assert [await guest.hear("next", LONG_S) for _ in "xyz"] == ["x", "y", "z"]
            await guest.close()

    asyncio.run(meet())


def test_a_host_without_others_waits_for_nobody() -> None:
    async def meet() -> None:
        assert await ParticipantConnections(SECRET, 1).gather("join", "alone", 0) == {0: "alone"}

    asyncio.run(meet())


def test_clocks_are_compared_by_the_stamps_of_both_sides() -> None:
    async def meet() -> tuple[float, ...]:
        async with hosting(2, now=lambda: 10.0) as (_, door):
            guest = await come(door, 1, lambda: 20.0)
            stamps = await guest.ask_clock(LONG_S)
            await guest.close()
            return stamps

    assert asyncio.run(meet()) == (20.0, 10.0, 10.0, 20.0)


def test_a_guest_knows_the_addresses_by_which_it_came() -> None:
    async def meet() -> None:
        async with hosting(2) as (_, door):
            guest = await come(door, 1)
            assert guest.via == ("127.0.0.1", "127.0.0.1")
            await guest.close()

    asyncio.run(meet())


def test_both_sides_count_what_they_send() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            guest = await come(door, 1)
            before, told = guest.sent, host.sent
            await guest.report("join", None)
            await host.gather("join", None, LONG_S)
            await host.tell("next", None)
            await guest.hear("next", LONG_S)
            assert guest.sent >= before + 1
            assert host.sent >= told + 1
            await guest.close()

    asyncio.run(meet())


# --- who is late ------------------------------------------------------------------------------------------------


def test_nodes_that_are_late_are_named() -> None:
    async def meet() -> None:
        async with hosting(5) as (host, door):
            guests = [await come(door, node) for node in (1, 2, 4)]
            for guest in guests[::2]:
                await guest.report("join", None)
                await heard(guest)
            with pytest.raises(ResponseTimeout) as late:
                await host.gather("join", None, 0)
            assert late.value.nodes == [2, 3]
            assert str(late.value) == "nodes 2, 3"
            for guest in guests:
                await guest.close()

    asyncio.run(meet())


def test_a_host_that_says_nothing_of_a_topic_in_time_is_late() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            guest = await come(door, 1)
            await host.tell("other", None)
            with pytest.raises(ResponseTimeout) as late:
                await guest.hear("next", 0)
            assert late.value.nodes == [0]
            await guest.close()

    asyncio.run(meet())


# --- who is gone ------------------------------------------------------------------------------------------------


# The kernel resets a connection that is closed before all that has arrived was read.
CLOSED = "it closed the connection|Connection reset by peer"


@pytest.mark.parametrize(("signal", "why"), [(None, CLOSED), ("SIGTERM", "it was stopped")], ids=["died", "stopped"])
def test_a_guest_that_leaves_is_named_with_its_signal(signal: str | None, why: str) -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            one, two = await come(door, 1), await come(door, 2)
            await two.report("join", None)
            await two.close(signal)
            await parted(host, 1)
            with pytest.raises(PeerLost, match=why) as left:
                await host.gather("join", None, LONG_S)
            assert (left.value.node, left.value.signal) == (2, signal)
            await one.close()

    asyncio.run(meet())


def test_a_guest_that_is_gone_is_missed_even_if_it_has_said_all() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            guest = await come(door, 1)
            await guest.report("join", None)
            assert await host.gather("join", None, LONG_S) == {0: None, 1: None}
            await guest.report("report", None)
            await guest.close()
            with pytest.raises(PeerLost, match=CLOSED):
                await host.gather("next", None, LONG_S)
            with pytest.raises(PeerLost, match=CLOSED):
                await host.gather("report", None, LONG_S)

    asyncio.run(meet())


@pytest.mark.parametrize(("signal", "why"), [(None, CLOSED), ("SIGUSR2", "it was stopped")], ids=["died", "stopped"])
def test_a_host_that_leaves_is_noticed_with_its_signal_by_all(signal: str | None, why: str) -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            guests = [await come(door, 1), await come(door, 2)]
            for guest in guests:
                await heard(guest)
            await host.close(signal)
            for guest in guests:
                with pytest.raises(PeerLost, match=why) as left:
                    await guest.hear("next", LONG_S)
                assert (left.value.node, left.value.signal) == (0, signal)
                with pytest.raises(PeerLost) as left:
                    while True:
                        await guest.report("join", None)
                assert (left.value.node, left.value.signal) == (0, signal)
                await guest.close()

    asyncio.run(meet())


def test_last_words_are_heard_to_the_end_while_guests_still_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_BEAT_S", 0.001)
    words = "x" * 3_000_000

    async def leave(guest: CoordinatorConnection) -> str:
        said: str = await guest.hear("next", LONG_S)
        await guest.close()
        return said

    async def meet() -> None:
        async with hosting(5) as (host, door):
            guests = [await come(door, node) for node in range(1, 5)]
            for guest in guests:
                await heard(guest)
            leaving = [asyncio.create_task(leave(guest)) for guest in guests]
            await host.tell("next", words)
            await host.part(LONG_S)
            await host.close()
            for each in leaving:
                assert await each == words

    asyncio.run(meet())


def test_a_guest_that_never_leaves_is_not_waited_for() -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            one, two = await come(door, 1), await come(door, 2)
            await heard(one)
            await heard(two)
            await one.close()
            await host.part(0.05)
            await parted(host, 1)
            assert set(host._gone) == {1}
            await two.close()
            await host.part(LONG_S)
            assert set(host._gone) == {1, 2}

    asyncio.run(meet())


def test_telling_all_goes_on_where_one_is_gone() -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            one, two = await come(door, 1), await come(door, 2)
            await heard(two)
            await one.close()
            with pytest.raises(PeerLost):
                await host.gather("join", None, LONG_S)
            await host.tell("next", "go on")
            await host.tell_each("next", {1: "for one", 2: "for two"})
            assert [await two.hear("next", LONG_S) for _ in range(2)] == ["go on", "for two"]
            await two.close()

    asyncio.run(meet())


def test_a_guest_without_a_sign_of_life_counts_as_dead_and_one_that_beats_does_not(clock: Clock) -> None:
    async def meet() -> None:
        async with hosting(3) as (host, door):
            channel, guest = await silent(door, 1), await come(door, 2)
            clock.jump(connections.SILENCE_S * 0.6)
            await heard(guest)
            waiting = asyncio.create_task(host.gather("join", None, LONG_S * 60))
            clock.jump(connections.SILENCE_S * 0.6)
            with pytest.raises(PeerLost) as left:
                await waiting
            assert (left.value.node, left.value.signal) == (1, None)
            assert str(left.value) == "it has not been heard of for 15 s"
            channel.close()
            await guest.close()

    asyncio.run(meet())


def test_a_host_without_a_sign_of_life_counts_as_dead(clock: Clock) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ChannelClosed):
            channel = await connections.accept(reader, writer, SECRET)
            while True:
                await channel.receive()

    async def meet() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        guest = await come(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], SECRET), 1)
        waiting = asyncio.create_task(guest.hear("next", LONG_S * 60))
        await asyncio.sleep(0)
        clock.jump(connections.SILENCE_S + 1)
        with pytest.raises(PeerLost) as left:
            await waiting
        assert (left.value.node, str(left.value)) == (0, "it has not been heard of for 15 s")
        await guest.close()
        server.close()

    asyncio.run(meet())


def test_guests_beat_and_the_host_beats_back(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(connections, "_BEAT_S", 0.01)

    async def meet() -> None:
        async with hosting(2) as (host, door):
            guest = await come(door, 1)
            for _ in range(3):
                clock.jump(connections.SILENCE_S * 0.6)
                began, guest._heard = clock.monotonic(), 0.0
                while min(guest._heard, host._heard.get(1, 0.0)) < began:
                    await asyncio.sleep(0.001)
                host._look_for_silence()
                assert not host._gone
            await guest.close()

    asyncio.run(asyncio.wait_for(meet(), LONG_S))


# --- who is let in ----------------------------------------------------------------------------------------------


def test_a_guest_that_comes_again_takes_the_place_of_the_first_one() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            first = await come(door, 1)
            await heard(first)
            second = await come(door, 1)
            await heard(second)
            with pytest.raises(PeerLost, match=CLOSED):
                await first.hear("next", LONG_S)
            await second.report("join", "second")
            assert await host.gather("join", None, LONG_S) == {0: None, 1: "second"}
            await host.tell("next", "go on")
            assert await second.hear("next", LONG_S) == "go on"
            await first.close()
            await second.close()

    asyncio.run(meet())


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_guest_with_a_number_that_no_guest_has_is_refused(number: int) -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            wrong = await come(door, number)
            with pytest.raises(PeerLost, match=CLOSED):
                await wrong.hear("next", LONG_S)
            assert host.refused == 1
            guest = await come(door, 1)
            await guest.report("join", None)
            assert await host.gather("join", None, LONG_S) == {0: None, 1: None}
            await wrong.close()
            await guest.close()

    asyncio.run(meet())


def test_strangers_are_counted_and_keep_nobody_out() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            reader, writer = await asyncio.open_connection(door.address, door.port)
            writer.write(bytes(48))
            await reader.read()
            writer.close()
            guest = await come(door, 1)
            await guest.report("join", None)
            assert await host.gather("join", None, LONG_S) == {0: None, 1: None}
            assert host.refused == 1
            await guest.close()

    asyncio.run(meet())


def test_one_who_knows_the_secret_but_says_nothing_is_no_guest() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            (await connect(door.address, door.port, door.secret)).close()
            guest = await come(door, 1)
            await guest.report("join", None)
            assert await host.gather("join", None, LONG_S) == {0: None, 1: None}
            await guest.close()

    asyncio.run(meet())


# --- finding node 0 ---------------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[Endpoint]:
    """A door behind which nobody listens."""
    with vacant("127.0.0.1") as port:
        yield Endpoint("127.0.0.1", port, SECRET)


def test_of_several_doors_the_one_that_works_is_found(nobody: Endpoint) -> None:
    async def meet() -> None:
        async with hosting(2) as (_, door), hosting(2, OTHER) as (other, elsewhere):
            wrong = Endpoint(elsewhere.address, elsewhere.port, SECRET)
            doors = [nobody, wrong, door]
            guest, secret = await connect_to_coordinator(lambda: doors, 1, LONG_S)
            assert secret == SECRET
            await heard(guest)
            assert not other._guests
            await guest.close()

    asyncio.run(meet())


def test_the_secret_of_the_door_that_works_is_the_one_that_counts() -> None:
    async def meet() -> bytes:
        async with hosting(2, OTHER) as (_, door):
            guest, secret = await connect_to_coordinator(
                lambda: [Endpoint(door.address, door.port, SECRET), door], 1, LONG_S
            )
            await guest.close()
            return secret

    assert asyncio.run(meet()) == OTHER


def test_a_door_that_is_told_of_later_is_tried_as_well(monkeypatch: pytest.MonkeyPatch, nobody: Endpoint) -> None:
    monkeypatch.setattr(connections, "_LOOK_S", 0.01)

    async def meet() -> None:
        async with hosting(2) as (_, door):
            told = [nobody]
            looks = 0

            def doors() -> Sequence[Endpoint]:
                nonlocal looks
                looks += 1
                return [*told, door] if looks > 3 else told

            guest, _ = await connect_to_coordinator(doors, 1, LONG_S)
            assert looks > 3
            await heard(guest)
            await guest.close()

    asyncio.run(meet())


def tries(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Something that happens when a door did not open."""
    failed = asyncio.Event()

    async def connecting(*door: Any) -> Channel:
        try:
            return await connect(*door)
        except OSError:
            failed.set()
            raise

    monkeypatch.setattr(connections, "connect", connecting)
    return failed


def test_a_host_that_does_not_listen_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch, nobody: Endpoint) -> None:
    failed = tries(monkeypatch)

    async def meet() -> None:
        finding = asyncio.create_task(connect_to_coordinator(lambda: [nobody], 1, LONG_S))
        await failed.wait()
        host = ParticipantConnections(SECRET, 2)
        await host.listen(listen(nobody.address, nobody.port))
        guest, secret = await finding
        await heard(guest)
        assert (guest.via[1], secret) == (nobody.address, SECRET)
        await guest.close()
        await host.close()

    asyncio.run(asyncio.wait_for(meet(), LONG_S))


def test_a_host_with_several_doors_has_one_guest_only() -> None:
    async def meet() -> None:
        async with hosting(2) as (host, door):
            # 127.0.0.0/8 is one machine; this one listens on one address of it, by two names.
            guest, _ = await connect_to_coordinator(
                lambda: [door, Endpoint("::ffff:127.0.0.1", door.port, SECRET)], 1, LONG_S
            )
            await guest.report("join", None)
            assert await host.gather("join", None, LONG_S) == {0: None, 1: None}
            assert list(host._guests) == [1]
            await parted(host, 1)
            await guest.close()

    asyncio.run(meet())


def test_where_nobody_is_found_each_door_is_told_with_what_was_wrong(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, nobody: Endpoint
) -> None:
    monkeypatch.setattr(connections, "_TRY_S", 0.5)
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

    async def meet() -> None:
        silence = listen("127.0.0.1", 0)
        async with hosting(2, OTHER) as (_, other):
            mute = Endpoint("127.0.0.1", silence.getsockname()[1], SECRET)
            wrong = Endpoint("127.0.0.1", other.port, SECRET)
            with pytest.raises(LaunchError) as error:
                await connect_to_coordinator(lambda: [nobody, mute, wrong], 1, LONG_S)
        silence.close()
        begin, _, said = str(error.value).partition(": ")
        assert begin == "node 0 could not be found within 60 s"
        assert set(said.split("; ")) == {
            f"127.0.0.1 port {nobody.port}: Connection refused",
            f"127.0.0.1 port {mute.port} does not answer",
            f"127.0.0.1 port {wrong.port}: it is none of this attempt's, or closed the connection",
        }

    asyncio.run(meet())


def test_where_no_door_is_known_that_is_said() -> None:
    with pytest.raises(LaunchError, match="within 0 s: nobody said where it is"):
        asyncio.run(connect_to_coordinator(lambda: [], 1, 0.01))


def test_a_search_that_is_given_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, nobody: Endpoint) -> None:
    failed = tries(monkeypatch)

    async def meet() -> None:
        silence = listen("127.0.0.1", 0)
        doors = [Endpoint("127.0.0.1", silence.getsockname()[1], SECRET), nobody]
        finding = asyncio.create_task(connect_to_coordinator(lambda: doors, 1, LONG_S))
        await failed.wait()
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        silence.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(meet())


@pytest.mark.parametrize("turns", range(8))
def test_a_search_can_be_given_up_at_the_moment_at_which_a_door_answers(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    async def meet() -> None:
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
        done, _ = await asyncio.wait({finding}, timeout=LONG_S)
        assert done == {finding}
        assert finding.cancelled()

    asyncio.run(meet())


def test_a_host_that_is_gone_as_soon_as_it_is_found_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SimpleNamespace):
        async def send(self, message: object) -> None:
            raise ChannelClosed("Connection reset by peer")

    async def meet(address: str, port: int, secret: bytes) -> Broken:
        return Broken()

    monkeypatch.setattr(connections, "connect", meet)
    with pytest.raises(PeerLost, match="Connection reset by peer") as left:
        asyncio.run(connect_to_coordinator(lambda: [Endpoint("127.0.0.1", 1, SECRET)], 1, LONG_S))
    assert left.value.node == 0
