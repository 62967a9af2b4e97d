"""All agents of an attempt in one process: what they agree on, and how they end if something is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from helpers.simulated_preflight import FAST, LONG_S, SECRET, SLOW, SimulatedPreflight, address, fast, slow

from slurmtrain.errors import LaunchError
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.checks import Finding
from slurmtrain.model.preflight.election import ExcludedAddress, Network, probe_targets
from slurmtrain.runtime.preflight import coordinator, participant
from slurmtrain.runtime.preflight.connections import PeerLost
from slurmtrain.runtime.preflight.participant import (
    Participant,
    PreflightOutcome,
    ProbeTask,
    in_background,
    participate,
)
from slurmtrain.runtime.preflight.ports import listen


def require_outcomes(outcomes: Sequence[PreflightOutcome | BaseException]) -> list[PreflightOutcome]:
    """The outcomes of all nodes. Raises the first exception, if there is one."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, PreflightOutcome)]


def run_all(preflight: SimulatedPreflight) -> list[PreflightOutcome]:
    return require_outcomes(preflight.run())


def finding(outcome: PreflightOutcome, check: str) -> Finding:
    [matching] = [outcome for outcome in outcome.findings if outcome.check == check]
    return matching


def statuses(outcomes: Sequence[PreflightOutcome], check: str) -> list[str]:
    return [finding(outcome, check).status for outcome in outcomes]


def election(outcome: PreflightOutcome) -> Mapping[str, Any]:
    assert outcome.election is not None
    return outcome.election.to_json()


# --- without faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 4, 16, 64])
def test_all_nodes_agree_on_the_rendezvous_and_on_the_fast_network(nodes: int) -> None:
    outcomes = run_all(SimulatedPreflight(nodes))
    assert len(outcomes) == nodes
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {tuple(outcome.blamed) for outcome in outcomes} == {()}
    [master] = {outcome.master for outcome in outcomes}
    assert master is not None
    assert master[0] == address(FAST, 0)
    assert [outcome.address for outcome in outcomes] == [address(FAST, node) for node in range(nodes)]
    assert {outcome.interface for outcome in outcomes} == {"fast0"}
    assert set(statuses(outcomes, "network")) == {"pass"}
    assert {finding(outcome, "network").summary for outcome in outcomes} == {"fast0 on 127.2.0.0/16, 100 Gbit/s"}
    assert [outcome.tests for outcome in outcomes] == [2 * len(probe_targets(node, nodes)) for node in range(nodes)]


def test_node_0_has_the_sockets_and_the_record_of_the_election() -> None:
    preflight = SimulatedPreflight(3)
    bound: list[socket.socket] = []

    def listen_and_note(listen_address: str) -> socket.socket:
        bound.append(listen(listen_address, 0))
        return bound[-1]

    preflight.listen = listen_and_note
    preflight.nodes[1].excluded = [
        ExcludedAddress(node=1, interface="eth9", address="10.0.0.9", reason="the interface is down")
    ]
    first, *others = run_all(preflight)
    assert bound == [first.control_listener]
    assert first.reserved is not None
    assert first.master is not None
    assert finding(first, "port").summary == f"port {first.master[1]} on 127.2.0.1"
    record = election(first)
    assert [outcome["name"] for outcome in record["networks"]] == ["127.2.0.0/16", "127.3.0.0/16"]
    assert record["networks"][0]["addresses"] == {"n0": "127.2.0.1", "n1": "127.2.0.2", "n2": "127.2.0.3"}
    assert [outcome["proved"] for outcome in record["networks"]] == [True, True]
    assert record["elected"] == 0
    assert record["tests"] == sum(outcome.tests for outcome in (first, *others)) == 12
    assert {(outcome["host"], outcome["interface"], outcome["why"]) for outcome in record["excluded"]} == {
        ("n1", "eth9", "the interface is down"),
        *((f"n{node}", "br0", "3 nodes have this address") for node in range(3)),
    }
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    for outcome in others:
        assert (outcome.election, outcome.reserved) == (None, None)


def test_every_node_measures_with_its_own_addresses_and_a_token_that_does_not_contain_the_secret() -> None:
    preflight = SimulatedPreflight(3)
    run_all(preflight)
    measured = preflight.calls["measure"]
    assert {node: own_addresses for node, (own_addresses, _) in measured.items()} == {
        node: [address(FAST, node), address(SLOW, node)] for node in range(3)
    }
    [token] = {token for _, token in measured.values()}
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert SECRET.hex() not in token


def test_what_a_node_measures_is_judged() -> None:
    preflight = SimulatedPreflight(3)
    room = {"path": "/tmp", "writable": True, "free": 5e11, "inodes": 9}
    for simulated, free in zip(preflight.nodes, (5e11, 2e8, 5e11), strict=True):
        simulated.facts["disk"] = {**room, "free": free}
    outcomes = run_all(preflight)
    assert statuses(outcomes, "disk") == ["pass", "fail", "pass"]
    assert [outcome.status for outcome in outcomes] == ["pass", "fail", "pass"]
    assert {outcome.problem for outcome in outcomes} == {"n1: disk: 0.2 GB free (limit 1 GB)"}
    assert {tuple(outcome.blamed) for outcome in outcomes} == {("n1",)}
    assert {outcome.master for outcome in outcomes} == {None}


def test_a_single_node_needs_no_network() -> None:
    preflight = SimulatedPreflight(1)
    [alone] = run_all(preflight)
    assert alone.problem is None
    assert alone.master is not None
    assert alone.master[0] == alone.address == "127.0.0.1"
    assert alone.interface == "lo"
    assert (alone.election, alone.sent, alone.tests) == (None, 0, 0)
    assert finding(alone, "network").status == "skip"
    assert "candidates" not in preflight.calls


def test_nodes_on_one_machine_need_no_network() -> None:
    preflight = SimulatedPreflight(3, single_machine=True)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {(outcome.address, outcome.interface) for outcome in outcomes} == {("127.0.0.1", "lo")}
    assert {outcome.master for outcome in outcomes} == {outcomes[0].master}
    assert {outcome.tests for outcome in outcomes} == {0}
    assert set(statuses(outcomes, "network")) == {"skip"}
    assert "candidates" not in preflight.calls
    assert preflight.calls["measure"][2][0] == []


# --- the port ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["fail", "warn", "off"])
def test_a_port_that_cannot_be_bound_ends_the_attempt_and_no_node_is_blamed(level: str) -> None:
    def refuse(listen_address: str) -> socket.socket:
        raise LaunchError(f"cannot listen on {listen_address}: none of 50 ports from 31000 on is free")

    preflight = SimulatedPreflight(2, port=level)
    preflight.listen = refuse
    outcomes = run_all(preflight)
    for outcome in outcomes:
        assert outcome.problem == "n0: port: cannot listen on 127.2.0.1: none of 50 ports from 31000 on is free"
        assert outcome.blamed == []
        assert outcome.master is None


# --- lost nodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "moment", "error"),
    [(2, "candidates", None), (2, "measure", None), (0, "measure", None), (1, "bandwidth", None),
     (1, "candidates", ImportError("no module named psutil"))],
)  # fmt: skip
def test_node_0_learns_which_node_has_died_and_all_others_end(node: int, moment: str, error: Exception | None) -> None:
    preflight = SimulatedPreflight(4, bandwidth="fail" if moment == "bandwidth" else "off")
    preflight.end_at(node, moment, error=error)
    outcomes = preflight.run()
    assert isinstance(outcomes[node], type(error) if error else asyncio.CancelledError)
    for other, outcome in enumerate(outcomes):
        if other != node:
            assert isinstance(outcome, PeerLost)
            assert (outcome.node, outcome.signal) == (0 if other else node, None)


@pytest.mark.parametrize(("node", "moment"), [(0, "measure"), (2, "candidates"), (2, "measure")])
def test_a_signal_at_one_node_is_reported_to_all(node: int, moment: str) -> None:
    preflight = SimulatedPreflight(4)
    preflight.end_at(node, moment, signal=signal.SIGTERM.name)
    outcomes = preflight.run()
    assert isinstance(outcomes[node], asyncio.CancelledError)
    for other, outcome in enumerate(outcomes):
        if other != node:
            assert isinstance(outcome, PeerLost)
            assert (outcome.node, outcome.signal) == (0 if other else node, "SIGTERM")


# --- time-outs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [{3: "rack1-node7"}, {}], ids=["known", "unknown"])
def test_a_node_that_never_joins_is_blamed_by_its_expected_host_name(hosts: dict[int, str]) -> None:
    preflight = SimulatedPreflight(4)
    preflight.nodes[3].joins = False
    preflight.join_s = 2.0
    preflight.expected_hosts = hosts
    outcomes = run_all(preflight)
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.problem == f"{hosts.get(3, 'node 3')}: agent: its agent has not reported in time"
        assert outcome.blamed == list(hosts.values())
        assert outcome.master is None


def test_a_node_that_does_not_report_in_time_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MARGIN_S", 2.0)
    monkeypatch.setattr(coordinator, "_DISCONNECT_S", 0.5)
    preflight = SimulatedPreflight(3, timeout_s=1)
    preflight.nodes[1].hangs = True
    outcomes = preflight.run()
    for outcome in require_outcomes([outcomes[0], outcomes[2]]):
        assert outcome.problem == "n1: agent: its agent has not reported in time"
        assert outcome.blamed == ["n1"]
    # It has been told, unless it has noticed first that node 0 is gone.
    assert isinstance(outcomes[1], PreflightOutcome | PeerLost)


def test_a_node_that_cannot_find_node_0_raises() -> None:
    def nothing(*_: Any) -> Any:
        return None

    lonely = Participant(
        node=1,
        nodes=2,
        host="n1",
        spec=Spec(),
        candidates=lambda: ([], []),
        measure=nothing,
        discipline=dict,
        reserve=nothing,
        listen=nothing,
        bandwidth=nothing,
        join_s=0.05,
    )
    with pytest.raises(LaunchError, match="node 0 could not be found within 0 s: its address is unknown"):
        asyncio.run(participate(lonely, list))


# --- probe tasks ------------------------------------------------------------------------------------------------


def test_a_task_survives_json_and_holds_only_what_a_node_needs() -> None:
    nodes = 64
    networks = [
        Network("one", {node: fast(node) for node in range(nodes)}),
        Network("two", {node: slow(node) for node in range(nodes)}),
    ]
    task = ProbeTask(networks, {node: 5000 + node for node in range(nodes)}, "token")
    plain = task.to_dict(nodes)
    for node in (0, 1, 37):
        record = ProbeTask.from_dict(json.loads(json.dumps(plain[node])))
        needed = {node, *probe_targets(node, nodes)}
        assert record.token == "token"
        assert record.ports == {other: 5000 + other for other in needed}
        assert [outcome.name for outcome in record.networks] == ["one", "two"]
        assert record.networks[1].members == {other: slow(other) for other in needed}
    assert ProbeTask([], {0: 0, 1: 0}, "token").to_dict(2)[1] == {"networks": [], "ports": {}, "token": "token"}


# --- networks ---------------------------------------------------------------------------------------------------


def test_if_one_node_is_cut_off_from_the_fast_network_the_slow_one_is_elected_with_a_warning() -> None:
    preflight = SimulatedPreflight(4)
    preflight.isolate(FAST, 2)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {outcome.interface for outcome in outcomes} == {"slow0"}
    assert outcomes[3].address == address(SLOW, 3)
    assert statuses(outcomes, "network") == ["pass", "pass", "warn", "pass"]
    assert finding(outcomes[2], "network").summary == (
        "slow0 on 127.3.0.0/16, 1 Gbit/s; fast0 on 127.2.0.0/16, 100 Gbit/s would be faster, but apart from n0, n1, n3 "
        "on 127.2.0.0/16: n0 cannot reach n2: 127.2.0.3: No route to host"
    )
    record = election(outcomes[0])
    assert [outcome["proved"] for outcome in record["networks"]] == [False, True]
    assert len(record["networks"][0]["problems"]) == 6
    assert record["elected"] == 1


def test_a_node_that_is_cut_off_on_every_network_is_blamed() -> None:
    preflight = SimulatedPreflight(4)
    preflight.isolate(FAST, 2)
    preflight.isolate(SLOW, 2)
    outcomes = run_all(preflight)
    assert statuses(outcomes, "network") == ["pass", "pass", "fail", "pass"]
    for outcome in outcomes:
        assert outcome.blamed == ["n2"]
        assert outcome.master is None
        assert (outcome.problem or "").startswith(
            "n2: network: apart from n0, n1, n3 on 127.2.0.0/16: n0 cannot reach n2"
        )
    assert election(outcomes[0])["elected"] is None


@pytest.mark.parametrize("ways", [[(1, 3), (3, 1)], [(1, 3)]], ids=["both", "one-way"])
def test_a_pair_that_does_not_reach_each_other_is_named_and_neither_is_blamed(ways: list[tuple[int, int]]) -> None:
    preflight = SimulatedPreflight(4)
    for source, target in ways:
        preflight.block(FAST, source, target)
        preflight.block(SLOW, source, target)
    outcomes = run_all(preflight)
    assert statuses(outcomes, "network") == ["pass", "fail", "pass", "fail"]
    for outcome in outcomes:
        assert outcome.blamed == []
        assert outcome.master is None
        assert (outcome.problem or "").startswith("n1, n3: network: n1 cannot reach n3: 127.2.0.4: No route to host")


def test_at_level_warn_training_continues_over_an_unproved_network() -> None:
    preflight = SimulatedPreflight(3, network={"level": "warn"})
    for network in (FAST, SLOW):
        preflight.isolate(network, 1)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {outcome.interface for outcome in outcomes} == {"fast0"}
    assert statuses(outcomes, "network") == ["pass", "warn", "pass"]


def test_rates_are_measured_if_no_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordinator, participant):
        monkeypatch.setattr(module, "RATE_S", LONG_S)
    preflight = SimulatedPreflight(3)
    for node, simulated in enumerate(preflight.nodes):
        simulated.candidates = [fast(node, speed_mbps=None), slow(node, speed_mbps=None)]
    outcomes = run_all(preflight)
    networks = election(outcomes[0])["networks"]
    assert len(networks) == 2
    assert all(outcome["measured_mb_per_s"] > 0 for outcome in networks)
    [interface] = {outcome.interface for outcome in outcomes}
    assert interface == networks[election(outcomes[0])["elected"]]["interfaces"]["n0"]


# --- bandwidth --------------------------------------------------------------------------------------------------


FIGURES = {"algbw_gb_s": 10.0, "busbw_gb_s": 15.0, "seconds": 0.01, "ranks": 3, "size_mb": 64.0, "backend": "gloo"}


def test_all_nodes_do_the_all_reduce_over_the_elected_network_with_one_store() -> None:
    preflight = SimulatedPreflight(3, bandwidth={"level": "fail", "min_gb_per_s": 12})
    for simulated in preflight.nodes:
        simulated.bandwidth = FIGURES
    preflight.isolate(FAST, 1)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert set(statuses(outcomes, "bandwidth")) == {"pass"}
    listen_address = preflight.calls["bandwidth"]
    [(place, port)] = {(place, port) for place, port, _ in listen_address.values()}
    assert place == address(SLOW, 0)
    assert (place, port) != outcomes[0].master
    assert {interface for _, _, interface in listen_address.values()} == {"slow0"}


def test_an_all_reduce_that_fails_ends_the_attempt_and_no_node_is_blamed() -> None:
    preflight = SimulatedPreflight(2, bandwidth="fail")
    preflight.nodes[0].bandwidth = FIGURES
    preflight.nodes[1].bandwidth = {"error": "Connection closed by peer"}
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {"n1: bandwidth: Connection closed by peer"}
    assert outcomes[0].blamed == []


# --- functions beside an event loop that nothing has to wait for --------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), TimeoutError()])
def test_what_a_function_raises_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def wait() -> None:
        with pytest.raises(type(error)) as raised:
            await in_background(fail)
        assert raised.value is error

    asyncio.run(wait())


def test_neither_the_loop_nor_the_interpreter_waits_for_a_function_that_hangs() -> None:
    program = """if True:
        import asyncio, threading
        from slurmtrain.runtime.preflight.participant import in_background
        async def give_up():
            try:
                async with asyncio.timeout(0.05):
                    await in_background(threading.Event().wait)
            except TimeoutError:
                print("given up")
        asyncio.run(give_up())
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("given up\n", "")
