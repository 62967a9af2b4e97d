"""Probes between the exact addresses that training is to use: real connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from helpers.simulated_preflight import Proxy

from slurmtrain.model.preflight.election import Candidate, Network, NetworkProblem
from slurmtrain.runtime.peers.channel import Channel, connect
from slurmtrain.runtime.preflight import participant
from slurmtrain.runtime.preflight.participant import RATE_BYTES, Prober
from slurmtrain.runtime.preflight.ports import listen

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
async def answering_probers(
    count: int = 2, secrets: Mapping[int, bytes] | None = None, **options: Any
) -> AsyncIterator[tuple[list[Prober], dict[int, int]]]:
    """Some nodes that answer probes, and their ports."""
    options = {"bind_source": True, **options}
    probers = [Prober(node, (secrets or {}).get(node, SECRET), **options) for node in range(count)]
    try:
        yield probers, {node: await prober.listen() for node, prober in enumerate(probers)}
    finally:
        for prober in probers:
            await prober.close()


def problems_between_two(
    network_to_probe: Network = TWO, timeout_s: float = LONG_S, ports: Mapping[int, int] | None = None, **options: Any
) -> list[NetworkProblem]:
    """The problems of node 0's probe of node 1."""

    async def scenario() -> list[NetworkProblem]:
        async with answering_probers(**options) as (probers, own_ports):
            return await probers[0].probe(network_to_probe, {**own_ports, **(ports or {})}, [1], timeout_s)

    return asyncio.run(scenario())


def reason_of(problems: list[NetworkProblem]) -> str:
    """The reason of the only problem, which is from node 0 to node 1."""
    [problem] = problems
    assert (problem.source, problem.target) == (0, 1)
    return problem.reason


# --- no problem -------------------------------------------------------------------------------------------------


async def test_nodes_that_reach_each_other_have_no_problem_and_count_their_connections() -> None:
    network_to_probe = network("127.2.0.1", "127.2.0.2", "127.2.0.3")
    async with answering_probers(3) as (probers, ports):
        problems = await asyncio.gather(
            *(
                prober.probe(network_to_probe, ports, [other for other in range(3) if other != node], LONG_S)
                for node, prober in enumerate(probers)
            )
        )
        assert problems == [[], [], []]
        assert [prober.made for prober in probers] == [2, 2, 2]


def test_a_node_can_answer_on_a_single_address() -> None:
    async def scenario() -> tuple[list[NetworkProblem], list[NetworkProblem]]:
        async with answering_probers(1) as (probers, _):
            other = Prober(1, SECRET)
            port = await other.listen("127.2.0.2")
            same_address = await probers[0].probe(TWO, {1: port}, [1], LONG_S)
            other_address = await probers[0].probe(network("127.2.0.1", "127.2.0.3"), {1: port}, [1], LONG_S)
            await other.close()
            return same_address, other_address

    same_address, other_address = asyncio.run(scenario())
    assert same_address == []
    assert reason_of(other_address) == "127.2.0.3: Connection refused"


# --- problems ---------------------------------------------------------------------------------------------------


def test_a_route_from_another_address_or_none_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever has no address in 127.2.0.0/16 of its own goes from 127.0.0.1.
    reason = "the kernel goes to 127.2.0.2 from {}, not from 127.2.0.1"
    assert reason_of(problems_between_two(bind_source=False)) == reason.format("127.0.0.1")
    monkeypatch.setattr(participant, "source_towards", lambda address: None)
    assert reason_of(problems_between_two(bind_source=False)) == reason.format("nowhere")


def test_an_answer_of_another_node_is_a_problem() -> None:
    async def scenario() -> list[NetworkProblem]:
        async with answering_probers(3) as (probers, ports):
            return await probers[0].probe(TWO, {1: ports[2]}, [1], LONG_S)

    assert reason_of(asyncio.run(scenario())) == "node 2 answers at 127.2.0.2"


def test_an_agent_of_another_attempt_is_a_problem() -> None:
    reason = reason_of(problems_between_two(secrets={1: OTHER}))
    assert reason == "at 127.2.0.2 it is not an agent of this attempt, or closed the connection"


def problems_through_proxy(
    timeout_s: float = LONG_S, network_to_probe: Network = TWO, **changes: Callable[[bytes], bytes]
) -> tuple[list[NetworkProblem], Proxy]:
    """The problems of node 0's probe of node 1 through a proxy that changes what it passes on."""

    async def scenario() -> tuple[list[NetworkProblem], Proxy]:
        async with answering_probers() as (probers, ports), Proxy(ports[1], address="127.2.0.2", **changes) as proxy:
            return await probers[0].probe(network_to_probe, {1: proxy.port}, [1], timeout_s), proxy

    return asyncio.run(scenario())


def losing_all_beyond(size: int) -> Callable[[bytes], bytes]:
    """Pass on so many bytes only; as soon as some are lost, the loop's clock jumps beyond every time-out."""
    remaining, has_lost = size, False

    def pass_on(piece: bytes) -> bytes:
        nonlocal remaining, has_lost
        passed, remaining = piece[:remaining], max(0, remaining - len(piece))
        if len(passed) < len(piece) and not has_lost:
            has_lost, loop = True, asyncio.get_running_loop()
            time = loop.time
            loop.time = lambda: time() + LONG_S  # type: ignore[method-assign]
        return passed

    return pass_on


@pytest.mark.parametrize("direction", ["forth_as", "back_as"])
def test_lost_larger_packets_are_told_apart_from_no_answer(direction: str) -> None:
    problems, _ = problems_through_proxy(**{direction: losing_all_beyond(500)})
    assert reason_of(problems) == "127.2.0.2 accepts the connection, but larger packets are lost within 60 s"


@pytest.mark.parametrize("mtu", [1500, 9000, 65520])
def test_a_probe_sends_more_than_the_largest_packet_both_ways(mtu: int) -> None:
    _, proxy = problems_through_proxy(network_to_probe=network("127.2.0.1", "127.2.0.2", mtu=mtu))
    assert 2 * mtu < len(proxy.forth) < 2 * mtu + 500
    assert 2 * mtu < len(proxy.back) < 2 * mtu + 500


def test_address_translation_is_a_problem() -> None:
    problems, proxy = problems_through_proxy()
    assert proxy.back
    assert reason_of(problems) == "it is seen as 127.0.0.1 at 127.2.0.2, not as 127.2.0.1"


# --- concurrency ------------------------------------------------------------------------------------------------


def test_at_most_64_probes_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now, peak = 0, 0

    async def count(*where: Any) -> Channel:
        nonlocal open_now, peak
        open_now += 1
        peak = max(peak, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(participant, "connect", count)

    async def scenario() -> list[NetworkProblem]:
        return await Prober(0, SECRET, bind_source=True).probe(TWO, {1: 1}, [1] * 200, LONG_S)

    assert len(asyncio.run(scenario())) == 200
    assert peak == 64


async def test_closing_ends_the_connections_that_are_being_served() -> None:
    async with answering_probers() as (probers, ports):
        reader, writer = await asyncio.open_connection("127.2.0.2", ports[1])
        await reader.readexactly(len(b"slurmtrain/1") + 16)
        channel = await connect("127.2.0.2", ports[1], SECRET)
        await probers[1].close()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        with pytest.raises(participant.ChannelClosed):
            await channel.receive()
        writer.close()
        channel.close()
        assert await probers[0].probe(TWO, ports, [1], LONG_S) != []


async def test_cancelled_probes_leave_no_task_behind() -> None:
    with listen("127.2.0.2", 0) as silence:
        async with answering_probers(1) as (probers, _):
            ports = {1: silence.getsockname()[1]}
            proving = asyncio.create_task(probers[0].probe(TWO, ports, [1] * 3, LONG_S))
            while probers[0].made < 3:
                await asyncio.sleep(0)
            proving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await proving
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- rates ------------------------------------------------------------------------------------------------------


def rate(timeout_s: float = LONG_S, **changes: Callable[[bytes], bytes]) -> tuple[float | None, Proxy]:
    async def measure() -> tuple[float | None, Proxy]:
        async with answering_probers() as (probers, ports), Proxy(ports[1], address="127.2.0.2", **changes) as proxy:
            return await probers[0].measure_rate(TWO, proxy.port, 1, timeout_s), proxy

    return asyncio.run(measure())


def test_a_rate_is_measured_with_a_load_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is no slow network.
    monkeypatch.setattr(participant, "_ENOUGH_S", LONG_S)
    bytes_per_s, proxy = rate()
    assert bytes_per_s is not None
    assert bytes_per_s > 0
    assert len(proxy.forth) > RATE_BYTES


def test_of_a_slow_network_half_of_the_load_is_enough() -> None:
    def slowly(chunk: bytes) -> bytes:
        time.sleep(0.02)
        return chunk

    bytes_per_s, proxy = rate(forth_as=slowly)
    assert bytes_per_s is not None
    assert RATE_BYTES // 2 < len(proxy.forth) < RATE_BYTES * 3 // 4


def test_nodes_that_do_not_answer_have_no_rate() -> None:
    async def measure(secret: bytes) -> float | None:
        async with answering_probers(2, {1: secret}) as (probers, ports):
            if secret == SECRET:
                await probers[1].close()
            return await probers[0].measure_rate(TWO, ports[1], 1, LONG_S)

    assert asyncio.run(measure(SECRET)) is None
    assert asyncio.run(measure(OTHER)) is None
