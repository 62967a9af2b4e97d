"""Whether nodes reach each other at the very addresses that training is to use: real connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from helpers.simulated_preflight import Middleman, vacant

from slurmtrain.model.preflight.election import Candidate, Network, NetworkProblem
from slurmtrain.runtime.preflight import probe
from slurmtrain.runtime.preflight.channel import Channel, connect
from slurmtrain.runtime.preflight.probe import RATE_BYTES, Prober
from slurmtrain.runtime.preflight.sockets import listen

SECRET, OTHER = bytes(32), bytes(range(32))
# Longer than any test takes, and long enough for a busy machine to miss nothing that is not lost.
LONG_S, SHORT_S = 60.0, 1.5


def network(*addresses: str, mtu: int = 1500) -> Network:
    members = {
        node: Candidate(interface="eth0", address=address, prefix=16, mtu=mtu) for node, address in enumerate(addresses)
    }
    return Network("test", members)


TWO = network("127.2.0.1", "127.2.0.2")


@contextlib.asynccontextmanager
async def provers(
    count: int = 2, secrets: Mapping[int, bytes] | None = None, **options: Any
) -> AsyncIterator[tuple[list[Prober], dict[int, int]]]:
    """Some nodes that answer, and their ports."""
    options = {"bind_source": True, **options}
    some = [Prober(node, (secrets or {}).get(node, SECRET), **options) for node in range(count)]
    try:
        yield some, {node: await each.listen() for node, each in enumerate(some)}
    finally:
        for each in some:
            await each.close()


def tried(
    over: Network = TWO, timeout_s: float = LONG_S, ports: Mapping[int, int] | None = None, **options: Any
) -> list[NetworkProblem]:
    """What node 0 finds wrong with the way to node 1."""

    async def prove() -> list[NetworkProblem]:
        async with provers(**options) as (some, known):
            return await some[0].prove(over, {**known, **(ports or {})}, [1], timeout_s)

    return asyncio.run(prove())


def why(problems: list[NetworkProblem]) -> str:
    """What the only problem is, from node 0 to node 1."""
    [problem] = problems
    assert (problem.source, problem.target) == (0, 1)
    return problem.why


# --- what is well -----------------------------------------------------------------------------------------------


def test_nodes_that_reach_each_other_have_no_problem_and_count_their_connections() -> None:
    async def prove() -> None:
        over = network("127.2.0.1", "127.2.0.2", "127.2.0.3")
        async with provers(3) as (some, ports):
            found = await asyncio.gather(
                *(
                    each.prove(over, ports, [other for other in range(3) if other != node], LONG_S)
                    for node, each in enumerate(some)
                )
            )
            assert found == [[], [], []]
            assert [each.made for each in some] == [2, 2, 2]

    asyncio.run(prove())


def test_the_route_of_the_kernel_is_taken() -> None:
    assert tried(network("127.0.0.1", "127.0.0.2"), bind_source=False) == []


def test_ipv6_is_proved_alike() -> None:
    if not socket.has_dualstack_ipv6() or probe.source_towards("::1") is None:
        pytest.skip("this machine has no IPv6")
    assert tried(network("::1", "::1"), bind_source=False) == []


def test_a_node_can_answer_at_one_of_its_addresses_only() -> None:
    async def prove() -> tuple[list[NetworkProblem], list[NetworkProblem]]:
        async with provers(1) as (some, _):
            other = Prober(1, SECRET)
            port = await other.listen("127.2.0.2")
            at_home = await some[0].prove(TWO, {1: port}, [1], LONG_S)
            elsewhere = await some[0].prove(network("127.2.0.1", "127.2.0.3"), {1: port}, [1], LONG_S)
            await other.close()
            return at_home, elsewhere

    at_home, elsewhere = asyncio.run(prove())
    assert at_home == []
    assert why(elsewhere) == "127.2.0.3: Connection refused"


# --- what is wrong ----------------------------------------------------------------------------------------------


def test_an_address_from_which_the_kernel_does_not_go_there_is_no_proof() -> None:
    # Whatever has no address in 127.2.0.0/16 of its own goes from 127.0.0.1.
    assert why(tried(bind_source=False)) == "the kernel goes to 127.2.0.2 from 127.0.0.1, not from 127.2.0.1"


def test_an_address_to_which_there_is_no_route_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "source_towards", lambda address: None)
    assert why(tried(bind_source=False)) == "the kernel goes to 127.2.0.2 from nowhere, not from 127.2.0.1"


def test_another_node_that_answers_is_named() -> None:
    async def prove() -> list[NetworkProblem]:
        async with provers(3) as (some, ports):
            return await some[0].prove(TWO, {1: ports[2]}, [1], LONG_S)

    assert why(asyncio.run(prove())) == "at 127.2.0.2 node 2 answers"


def test_an_agent_of_another_attempt_is_none_of_ours() -> None:
    said = why(tried(secrets={1: OTHER}))
    assert said == "at 127.2.0.2 it is none of this attempt's, or closed the connection"


def test_nobody_at_an_address_is_told_by_the_kernel() -> None:
    with vacant("127.2.0.2") as port:
        assert why(tried(ports={1: port})) == "127.2.0.2: Connection refused"


def test_an_address_that_this_node_does_not_have_is_told() -> None:
    assert why(tried(network("192.0.2.7", "127.2.0.2"))) == "127.2.0.2: Cannot assign requested address"


def test_a_node_that_does_not_answer_is_not_waited_for() -> None:
    with listen("127.2.0.2", 0) as silence:
        said = why(tried(timeout_s=SHORT_S, ports={1: silence.getsockname()[1]}))
    assert said == "127.2.0.2 does not answer within 1.5 s"


def between(
    timeout_s: float = LONG_S, over: Network = TWO, **changes: Callable[[bytes], bytes]
) -> tuple[list[NetworkProblem], Middleman]:
    """What node 0 finds wrong with the way to node 1 where somebody stands between them."""

    async def prove() -> tuple[list[NetworkProblem], Middleman]:
        async with provers() as (some, ports), Middleman(ports[1], address="127.2.0.2", **changes) as middle:
            return await some[0].prove(over, {1: middle.port}, [1], timeout_s), middle

    return asyncio.run(prove())


def losing_all_beyond(size: int) -> Callable[[bytes], bytes]:
    """What a way does that carries small packets only; as soon as one is lost, all time is over that there was."""
    left, lost = size, False

    def pass_on(piece: bytes) -> bytes:
        nonlocal left, lost
        kept, left = piece[:left], max(0, left - len(piece))
        if len(kept) < len(piece) and not lost:
            lost, loop = True, asyncio.get_running_loop()
            time = loop.time
            loop.time = lambda: time() + LONG_S  # type: ignore[method-assign]
        return kept

    return pass_on


@pytest.mark.parametrize("way", ["forth_as", "back_as"])
def test_a_way_that_loses_larger_packets_is_told_from_one_that_is_closed(way: str) -> None:
    found, _ = between(**{way: losing_all_beyond(500)})
    assert why(found) == "127.2.0.2 connects, but loses larger packets within 60 s"


@pytest.mark.parametrize("mtu", [1500, 9000, 65520])
def test_more_than_the_largest_packet_goes_both_ways(mtu: int) -> None:
    _, middle = between(over=network("127.2.0.1", "127.2.0.2", mtu=mtu))
    assert 2 * mtu < len(middle.forth) < 2 * mtu + 500
    assert 2 * mtu < len(middle.back) < 2 * mtu + 500


def test_an_address_that_is_changed_on_the_way_is_no_proof() -> None:
    found, middle = between()
    assert middle.back
    assert why(found) == "it is seen as 127.0.0.1 at 127.2.0.2, not as 127.2.0.1"


def test_a_node_that_breaks_off_is_told() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await probe.accept(reader, writer, SECRET)
        await channel.receive()
        channel.close()

    async def prove() -> list[NetworkProblem]:
        server = await asyncio.start_server(hang_up, "127.2.0.2", 0)
        async with provers(1) as (some, _):
            found = await some[0].prove(TWO, {1: server.sockets[0].getsockname()[1]}, [1], LONG_S)
        server.close()
        return found

    assert why(asyncio.run(prove())) == "127.2.0.2: it closed the connection"


def test_a_problem_with_one_node_is_none_with_the_others() -> None:
    async def prove() -> list[NetworkProblem]:
        over = network("127.2.0.1", "127.2.0.2", "127.2.0.3", "127.2.0.4")
        async with provers(4, {2: OTHER}) as (some, ports):
            return await some[0].prove(over, ports, [1, 2, 3], LONG_S)

    [problem] = asyncio.run(prove())
    assert (problem.source, problem.target) == (0, 2)


def test_strangers_at_the_port_disturb_nobody() -> None:
    async def prove() -> list[NetworkProblem]:
        async with provers() as (some, ports):
            reader, writer = await asyncio.open_connection("127.2.0.2", ports[1])
            writer.write(bytes(100))
            await reader.read()
            writer.close()
            return await some[0].prove(TWO, ports, [1], LONG_S)

    assert asyncio.run(prove()) == []


# --- how it is done ---------------------------------------------------------------------------------------------


def test_no_more_than_some_connections_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def count(*where: Any) -> Channel:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(probe, "connect", count)

    async def prove() -> list[NetworkProblem]:
        return await Prober(0, SECRET, bind_source=True).prove(TWO, {1: 1}, [1] * 200, LONG_S)

    assert len(asyncio.run(prove())) == 200
    assert most == 64


def test_one_who_ends_leaves_those_who_were_being_served() -> None:
    async def prove() -> None:
        async with provers() as (some, ports):
            reader, writer = await asyncio.open_connection("127.2.0.2", ports[1])
            await reader.readexactly(len(b"slurmtrain/1") + 16)
            channel = await connect("127.2.0.2", ports[1], SECRET)
            await some[1].close()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            with pytest.raises(probe.ChannelClosed):
                await channel.receive()
            writer.close()
            channel.close()
            assert await some[0].prove(TWO, ports, [1], LONG_S) != []

    asyncio.run(prove())


def test_proofs_that_are_given_up_leave_nothing_behind() -> None:
    async def prove() -> None:
        with listen("127.2.0.2", 0) as silence:
            async with provers(1) as (some, _):
                ports = {1: silence.getsockname()[1]}
                proving = asyncio.create_task(some[0].prove(TWO, ports, [1] * 3, LONG_S))
                while some[0].made < 3:
                    await asyncio.sleep(0)
                proving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await proving
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(prove())


# --- how fast it is ---------------------------------------------------------------------------------------------


def rate(timeout_s: float = LONG_S, **changes: Callable[[bytes], bytes]) -> tuple[float | None, Middleman]:
    async def measure() -> tuple[float | None, Middleman]:
        async with provers() as (some, ports), Middleman(ports[1], address="127.2.0.2", **changes) as middle:
            return await some[0].rate(TWO, middle.port, 1, timeout_s), middle

    return asyncio.run(measure())


def test_the_rate_is_that_of_a_load_which_the_other_side_has_taken() -> None:
    found, middle = rate()
    assert found is not None
    assert found > 0
    assert len(middle.forth) > RATE_BYTES


def test_a_way_that_loses_the_load_has_no_rate() -> None:
    assert rate(forth_as=losing_all_beyond(500))[0] is None


def test_nodes_that_do_not_answer_have_no_rate() -> None:
    async def measure(secret: bytes) -> float | None:
        async with provers(2, {1: secret}) as (some, ports):
            if secret == SECRET:
                await some[1].close()
            return await some[0].rate(TWO, ports[1], 1, LONG_S)

    assert asyncio.run(measure(SECRET)) is None
    assert asyncio.run(measure(OTHER)) is None
