"""All agents of an attempt in one process: what they agree on, and what becomes of them where something is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest
from helpers.simulated_preflight import FAST, LONG_S, SECRET, SLOW, Meeting, address, fast, slow

from slurmtrain.errors import LaunchError
from slurmtrain.model.preflight.election import Candidate, ExcludedAddress, Network, probe_targets
from slurmtrain.model.preflight.finding import Finding
from slurmtrain.model.spec.spec import Spec
from slurmtrain.runtime.preflight import coordinator, participant
from slurmtrain.runtime.preflight.connections import PeerLost
from slurmtrain.runtime.preflight.participant import Participant, PreflightOutcome, ProbeTask, participate
from slurmtrain.runtime.preflight.sockets import listen


def outcomes(ended: Sequence[PreflightOutcome | BaseException]) -> list[PreflightOutcome]:
    """What all nodes came to, where all of them came to something."""
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return [one for one in ended if isinstance(one, PreflightOutcome)]


def held(meeting: Meeting) -> list[PreflightOutcome]:
    return outcomes(meeting.hold())


def finding(outcome: PreflightOutcome, check: str) -> Finding:
    [found] = [one for one in outcome.findings if one.check == check]
    return found


def statuses(ended: Sequence[PreflightOutcome], check: str) -> list[str]:
    return [finding(one, check).status for one in ended]


def election(outcome: PreflightOutcome) -> Mapping[str, Any]:
    assert outcome.election is not None
    return outcome.election.to_json()


# --- where all is well ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 4, 16, 64])
def test_all_nodes_agree_on_the_place_to_meet_and_on_the_fast_network(nodes: int) -> None:
    ended = held(Meeting(nodes))
    assert len(ended) == nodes
    assert {one.problem for one in ended} == {None}
    assert {tuple(one.blamed) for one in ended} == {()}
    [master] = {one.master for one in ended}
    assert master is not None
    assert master[0] == address(FAST, 0)
    assert [one.address for one in ended] == [address(FAST, node) for node in range(nodes)]
    assert {one.interface for one in ended} == {"fast0"}
    assert set(statuses(ended, "network")) == {"pass"}
    assert {finding(one, "network").summary for one in ended} == {"fast0 on 127.2.0.0/16, 100 Gbit/s"}
    assert [one.tests for one in ended] == [2 * len(probe_targets(node, nodes)) for node in range(nodes)]


def test_node_0_holds_the_port_and_the_story_of_the_election() -> None:
    meeting = Meeting(3)
    bound: list[socket.socket] = []

    def listen_and_note(where: str) -> socket.socket:
        bound.append(listen(where, 0))
        return bound[-1]

    meeting.listen = listen_and_note
    meeting.members[1].excluded = [
        ExcludedAddress(node=1, interface="eth9", address="10.0.0.9", why="the interface is down")
    ]
    first, *others = held(meeting)
    assert bound == [first.listener]
    assert first.master is not None
    assert finding(first, "port").summary == f"port {first.master[1]} on 127.2.0.1"
    told = election(first)
    assert [one["name"] for one in told["networks"]] == ["127.2.0.0/16", "127.3.0.0/16"]
    assert told["networks"][0]["addresses"] == {"n0": "127.2.0.1", "n1": "127.2.0.2", "n2": "127.2.0.3"}
    assert [one["proved"] for one in told["networks"]] == [True, True]
    assert told["elected"] == 0
    assert told["tests"] == sum(one.tests for one in (first, *others)) == 12
    assert {(one["host"], one["interface"], one["why"]) for one in told["excluded"]} == {
        ("n1", "eth9", "the interface is down"),
        *((f"n{node}", "br0", "3 nodes have this address") for node in range(3)),
    }
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    for one in others:
        assert (one.election, one.listener) == (None, None)


def test_every_clock_is_compared_with_that_of_node_0() -> None:
    first, *others = held(Meeting(3))
    assert (first.clock["offset_ms"], first.clock["bound_ms"], first.clock["samples"]) == (0.0, 0.0, 0)
    for one in others:
        assert abs(one.clock["offset_ms"]) <= one.clock["bound_ms"]
        assert one.clock["samples"] == 32
        assert (one.clock["disciplined"], one.clock["source"]) == (True, "chrony")


def test_every_node_measures_with_its_own_addresses_and_a_token_that_tells_nothing_of_the_secret() -> None:
    meeting = Meeting(3)
    held(meeting)
    measured = meeting.asked["measure"]
    assert {node: own for node, (own, _) in measured.items()} == {
        node: [address(FAST, node), address(SLOW, node)] for node in range(3)
    }
    [token] = {token for _, token in measured.values()}
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert SECRET.hex() not in token


def test_what_a_node_measures_is_judged() -> None:
    meeting = Meeting(3)
    room = {"path": "/tmp", "writable": True, "free": 5e11, "inodes": 9}
    for member, free in zip(meeting.members, (5e11, 2e8, 5e11), strict=True):
        member.facts["disk"] = {**room, "free": free}
    ended = held(meeting)
    assert statuses(ended, "disk") == ["pass", "fail", "pass"]
    assert [one.status for one in ended] == ["pass", "fail", "pass"]
    assert {one.problem for one in ended} == {"n1: disk: 0.2 GB free (limit 1 GB)"}
    assert {tuple(one.blamed) for one in ended} == {("n1",)}
    assert {one.master for one in ended} == {None}


def test_a_single_node_meets_nobody_and_needs_no_network() -> None:
    meeting = Meeting(1)
    [alone] = held(meeting)
    assert alone.problem is None
    assert alone.master is not None
    assert alone.master[0] == alone.address == "127.0.0.1"
    assert alone.interface == "lo"
    assert (alone.election, alone.sent, alone.tests) == (None, 0, 0)
    assert finding(alone, "network").status == "skip"
    assert "candidates" not in meeting.asked


def test_nodes_on_one_machine_need_no_network() -> None:
    meeting = Meeting(3, together=True)
    ended = held(meeting)
    assert {one.problem for one in ended} == {None}
    assert {(one.address, one.interface) for one in ended} == {("127.0.0.1", "lo")}
    assert {one.master for one in ended} == {ended[0].master}
    assert {one.tests for one in ended} == {0}
    assert set(statuses(ended, "network")) == {"skip"}
    assert "candidates" not in meeting.asked
    assert meeting.asked["measure"][2][0] == []


def _ipv6() -> str | None:
    """An address of this machine that others could reach, if it has one."""
    return next(
        (
            one.address
            for some in psutil.net_if_addrs().values()
            for one in some
            if one.family == socket.AF_INET6 and one.address != "::1" and not one.address.startswith("fe80")
        ),
        None,
    )


def test_nodes_meet_over_ipv6() -> None:
    own = _ipv6()
    if own is None or not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no two addresses of IPv6")
    meeting = Meeting(2)
    for member, each in zip(meeting.members, (own, "::1"), strict=True):
        member.candidates = [Candidate(interface="eth0", address=each, prefix=128)]
    ended = held(meeting)
    assert {one.problem for one in ended} == {None}
    assert [one.address for one in ended] == [own, "::1"]
    assert {one.master for one in ended} == {ended[0].master}
    assert election(ended[0])["networks"][0]["family"] == 6


# --- clocks -----------------------------------------------------------------------------------------------------


def test_a_node_whose_clock_is_off_is_blamed() -> None:
    meeting = Meeting(3)
    meeting.members[2].ahead_s = 5.0
    ended = held(meeting)
    assert statuses(ended, "clock") == ["pass", "pass", "fail"]
    for one in ended:
        assert one.blamed == ["n2"]
        assert re.fullmatch(
            r"n2: clock: (?:5 s|(?:4\.99|5\.00)\d s) ahead of (?:n0|the other 2 nodes) \(.*limit 1 s\)",
            one.problem or "",
        )
    assert ended[2].clock["offset_ms"] == pytest.approx(5000, abs=ended[2].clock["bound_ms"])


def test_node_0_is_blamed_where_its_clock_differs_from_all_others() -> None:
    meeting = Meeting(4)
    meeting.members[0].ahead_s = -5.0
    ended = held(meeting)
    assert statuses(ended, "clock") == ["fail", "pass", "pass", "pass"]
    assert {tuple(one.blamed) for one in ended} == {("n0",)}
    assert "behind the other 3 nodes" in finding(ended[0], "clock").summary


def test_where_the_level_says_so_a_clock_is_only_told() -> None:
    meeting = Meeting(2, clock="warn")
    meeting.members[1].ahead_s = 5.0
    ended = held(meeting)
    assert statuses(ended, "clock") == ["pass", "warn"]
    assert ended[0].master is not None


# --- networks ---------------------------------------------------------------------------------------------------


def test_where_the_fast_network_is_blocked_at_one_node_the_slow_one_is_taken_and_the_node_is_warned() -> None:
    meeting = Meeting(4)
    meeting.isolate(FAST, 2)
    ended = held(meeting)
    assert {one.problem for one in ended} == {None}
    assert {one.interface for one in ended} == {"slow0"}
    assert ended[3].address == address(SLOW, 3)
    assert statuses(ended, "network") == ["pass", "pass", "warn", "pass"]
    assert finding(ended[2], "network").summary == (
        "slow0 on 127.3.0.0/16, 1 Gbit/s; fast0 on 127.2.0.0/16, 100 Gbit/s would be better, but apart from n0, n1, n3 "
        "on 127.2.0.0/16: n0 cannot reach n2: 127.2.0.3: No route to host"
    )
    told = election(ended[0])
    assert [one["proved"] for one in told["networks"]] == [False, True]
    assert len(told["networks"][0]["problems"]) == 6
    assert told["elected"] == 1


def test_a_node_that_is_apart_on_every_network_is_blamed() -> None:
    meeting = Meeting(4)
    meeting.isolate(FAST, 2)
    meeting.isolate(SLOW, 2)
    ended = held(meeting)
    assert statuses(ended, "network") == ["pass", "pass", "fail", "pass"]
    for one in ended:
        assert one.blamed == ["n2"]
        assert one.master is None
        assert (one.problem or "").startswith("n2: network: apart from n0, n1, n3 on 127.2.0.0/16: n0 cannot reach n2")
    assert election(ended[0])["elected"] is None


def test_two_nodes_that_are_apart_from_all_others_are_both_blamed() -> None:
    meeting = Meeting(6)
    for node in (1, 4):
        meeting.isolate(FAST, node)
        meeting.isolate(SLOW, node)
    assert held(meeting)[0].blamed == ["n1", "n4"]


@pytest.mark.parametrize("ways", [[(1, 3), (3, 1)], [(1, 3)]], ids=["both", "one-way"])
def test_a_pair_that_is_apart_is_named_and_nobody_is_blamed(ways: list[tuple[int, int]]) -> None:
    meeting = Meeting(4)
    for source, target in ways:
        meeting.block(FAST, source, target)
        meeting.block(SLOW, source, target)
    ended = held(meeting)
    assert statuses(ended, "network") == ["pass", "fail", "pass", "fail"]
    for one in ended:
        assert one.blamed == []
        assert one.master is None
        assert (one.problem or "").startswith("n1, n3: network: n1 cannot reach n3: 127.2.0.4: No route to host")


def test_of_64_nodes_the_one_that_is_apart_is_blamed_though_few_have_tried_it() -> None:
    meeting = Meeting(64)
    for node in (FAST, SLOW):
        meeting.isolate(node, 37)
    ended = held(meeting)
    assert {tuple(one.blamed) for one in ended} == {("n37",)}
    assert statuses(ended, "network").count("fail") == 1


def test_nodes_without_a_network_in_common_are_told_so() -> None:
    meeting = Meeting(2)
    meeting.members[0].candidates = [fast(0)]
    meeting.members[1].candidates = []
    ended = held(meeting)
    assert ended[1].problem == (
        "n0, n1: network: the nodes have no network in common (n0: it has fast0; n1: it has no usable interface)"
    )
    assert ended[0].blamed == []
    assert ended[0].election is None


def test_nodes_that_call_their_interfaces_differently_each_learn_their_own() -> None:
    meeting = Meeting(3)
    for node, name in enumerate(("hsn0", "ib0", "enp1s0")):
        meeting.members[node].candidates = [fast(node, name)]
    ended = held(meeting)
    assert [one.interface for one in ended] == ["hsn0", "ib0", "enp1s0"]
    assert ended[0].problem is None


def test_the_interface_that_the_spec_asks_for_is_taken_though_another_is_faster() -> None:
    ended = held(Meeting(3, interface="slow0"))
    assert {one.interface for one in ended} == {"slow0"}
    assert election(ended[0])["networks"][0]["pinned"] is True


def test_a_node_without_the_interface_that_the_spec_asks_for_is_blamed() -> None:
    meeting = Meeting(3, interface="fast0")
    meeting.members[1].candidates = [slow(1)]
    ended = held(meeting)
    assert ended[0].blamed == ["n1"]
    assert ended[0].problem == "n1: network: fast0 (network.interface) is not there, or down; it has slow0"


def test_where_the_level_says_so_training_goes_on_over_a_network_that_was_not_proved() -> None:
    meeting = Meeting(3, network={"level": "warn"})
    for network in (FAST, SLOW):
        meeting.isolate(network, 1)
    ended = held(meeting)
    assert {one.problem for one in ended} == {None}
    assert {one.interface for one in ended} == {"fast0"}
    assert statuses(ended, "network") == ["pass", "warn", "pass"]


def test_where_the_check_is_off_no_connection_is_tried() -> None:
    ended = held(Meeting(3, network="off"))
    assert {one.tests for one in ended} == {0}
    assert {one.interface for one in ended} == {"fast0"}
    assert {one.problem for one in ended} == {None}


def test_where_no_speed_is_known_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordinator, participant):
        monkeypatch.setattr(module, "RATE_S", LONG_S)
    meeting = Meeting(3)
    for node, member in enumerate(meeting.members):
        member.candidates = [fast(node, speed_mbps=None), slow(node, speed_mbps=None)]
    ended = held(meeting)
    networks = election(ended[0])["networks"]
    assert len(networks) == 2
    assert all(one["measured_mb_per_s"] > 0 for one in networks)
    [interface] = {one.interface for one in ended}
    assert interface == networks[election(ended[0])["elected"]]["interfaces"]["n0"]


# --- the port ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["fail", "warn", "off"])
def test_a_port_that_cannot_be_bound_ends_the_attempt_and_nobody_is_blamed(level: str) -> None:
    def refuse(where: str) -> socket.socket:
        raise LaunchError(f"cannot listen on {where}: none of 50 ports from 31000 on is free")

    meeting = Meeting(2, port=level)
    meeting.listen = refuse
    ended = held(meeting)
    for one in ended:
        assert one.problem == "n0: port: cannot listen on 127.2.0.1: none of 50 ports from 31000 on is free"
        assert one.blamed == []
        assert one.master is None


def test_where_another_check_has_failed_no_port_is_bound() -> None:
    meeting = Meeting(2)
    meeting.members[1].facts["disk"] = {"timeout": 30}
    held(meeting)
    assert "listen" not in meeting.asked


def test_where_the_check_of_the_port_is_off_it_is_bound_without_a_word() -> None:
    ended = held(Meeting(2, port="off"))
    assert ended[0].master is not None
    assert "port" not in {one.check for one in ended[0].findings}


# --- bandwidth --------------------------------------------------------------------------------------------------

FIGURES = {"algbw_gb_s": 10.0, "busbw_gb_s": 15.0, "seconds": 0.01, "ranks": 3, "size_mb": 64.0, "backend": "gloo"}


def test_all_nodes_reduce_at_one_place_over_the_elected_network() -> None:
    meeting = Meeting(3, bandwidth={"level": "fail", "min_gb_per_s": 12})
    for member in meeting.members:
        member.bandwidth = FIGURES
    meeting.isolate(FAST, 1)
    ended = held(meeting)
    assert {one.problem for one in ended} == {None}
    assert set(statuses(ended, "bandwidth")) == {"pass"}
    where = meeting.asked["bandwidth"]
    [(place, port)] = {(place, port) for place, port, _ in where.values()}
    assert place == address(SLOW, 0)
    assert (place, port) != ended[0].master
    assert {interface for _, _, interface in where.values()} == {"slow0"}


def test_an_all_reduce_that_fails_ends_the_attempt_and_nobody_is_blamed() -> None:
    meeting = Meeting(2, bandwidth="fail")
    meeting.members[0].bandwidth = FIGURES
    meeting.members[1].bandwidth = {"error": "Connection closed by peer"}
    ended = held(meeting)
    assert {one.problem for one in ended} == {"n1: bandwidth: Connection closed by peer"}
    assert ended[0].blamed == []


def test_bandwidth_is_not_measured_unless_it_is_asked_for() -> None:
    meeting = Meeting(2)
    held(meeting)
    assert "bandwidth" not in meeting.asked


# --- nodes that are gone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["candidates", "measure"])
def test_a_node_that_dies_is_named_to_node_0_and_all_others_end(moment: str) -> None:
    meeting = Meeting(4)
    meeting.die(2, moment)
    first, second, dead, last = meeting.hold()
    assert isinstance(dead, asyncio.CancelledError)
    assert isinstance(first, PeerLost)
    assert (first.node, first.signal) == (2, None)
    for one in (second, last):
        assert isinstance(one, PeerLost)
        assert (one.node, one.signal) == (0, None)


@pytest.mark.parametrize(("node", "moment"), [(0, "measure"), (2, "candidates"), (2, "measure")])
def test_a_signal_at_one_node_is_told_to_all(node: int, moment: str) -> None:
    meeting = Meeting(4)
    meeting.die(node, moment, signal=signal.SIGTERM.name)
    ended = meeting.hold()
    assert isinstance(ended[node], asyncio.CancelledError)
    for other, one in enumerate(ended):
        if other != node:
            assert isinstance(one, PeerLost)
            assert (one.node, one.signal) == (0 if other else node, "SIGTERM")


def test_a_node_that_dies_while_all_reduce_is_named() -> None:
    meeting = Meeting(3, bandwidth="fail")
    meeting.die(1, "bandwidth")
    first, _, last = meeting.hold()
    assert isinstance(first, PeerLost)
    assert first.node == 1
    assert isinstance(last, PeerLost)
    assert last.node == 0


def test_an_agent_that_fails_is_gone_for_the_others() -> None:
    meeting = Meeting(3)
    meeting.die(1, "candidates", error=ImportError("no module named psutil"))
    first, broken, last = meeting.hold()
    assert isinstance(broken, ImportError)
    assert isinstance(first, PeerLost)
    assert first.node == 1
    assert isinstance(last, PeerLost)


def test_node_0_that_dies_is_gone_for_all_others() -> None:
    meeting = Meeting(3)
    meeting.die(0, "measure")
    first, *others = meeting.hold()
    assert isinstance(first, asyncio.CancelledError)
    for one in others:
        assert isinstance(one, PeerLost)
        assert (one.node, one.signal) == (0, None)


# --- nodes that are late ----------------------------------------------------------------------------------------


def never_coming(named: bool) -> list[PreflightOutcome]:
    meeting = Meeting(4)
    meeting.members[3].comes = False
    meeting.join_s = 2.0
    if named:
        meeting.expected_hosts[3] = "rack1-node7"
    else:
        meeting.expected_hosts = {}
    return held(meeting)


def test_a_node_that_never_comes_is_named_to_all_by_the_host_that_was_expected_and_blamed() -> None:
    ended = never_coming(named=True)
    assert len(ended) == 3
    for one in ended:
        assert one.problem == "rack1-node7: agent: its agent has not reported in time"
        assert one.blamed == ["rack1-node7"]
        assert one.master is None


def test_a_node_that_never_comes_and_has_no_name_is_not_blamed() -> None:
    for one in never_coming(named=False):
        assert one.problem == "node 3: agent: its agent has not reported in time"
        assert one.blamed == []


def test_a_node_that_does_not_report_in_time_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MARGIN_S", 2.0)
    monkeypatch.setattr(coordinator, "_DISCONNECT_S", 0.5)
    meeting = Meeting(3, timeout_s=1)
    meeting.members[1].hangs = True
    ended = meeting.hold()
    for one in outcomes([ended[0], ended[2]]):
        assert one.problem == "n1: agent: its agent has not reported in time"
        assert one.blamed == ["n1"]
    # It has been told, unless it has noticed first that node 0 is gone.
    assert isinstance(ended[1], PreflightOutcome | PeerLost)


def test_a_node_that_cannot_find_node_0_says_so() -> None:
    def nothing(*_: Any) -> Any:
        return None

    party = Participant(
        node=1,
        nodes=2,
        host="n1",
        spec=Spec(),
        candidates=lambda: ([], []),
        measure=nothing,
        discipline=dict,
        warm_up=lambda: None,
        listen=nothing,
        bandwidth=nothing,
        join_s=0.05,
    )
    with pytest.raises(LaunchError, match="node 0 could not be found within 0 s: nobody said where it is"):
        asyncio.run(participate(party, list))


# --- what is said -----------------------------------------------------------------------------------------------


def test_a_task_survives_being_told_and_holds_only_what_a_node_needs() -> None:
    nodes = 64
    networks = [
        Network("one", {node: fast(node) for node in range(nodes)}),
        Network("two", {node: slow(node) for node in range(nodes)}),
    ]
    task = ProbeTask(networks, {node: 5000 + node for node in range(nodes)}, "token")
    plain = task.to_dict(nodes)
    for node in (0, 1, 37):
        told = ProbeTask.from_dict(json.loads(json.dumps(plain[node])))
        needed = {node, *probe_targets(node, nodes)}
        assert told.token == "token"
        assert told.ports == {other: 5000 + other for other in needed}
        assert [one.name for one in told.networks] == ["one", "two"]
        assert told.networks[1].members == {other: slow(other) for other in needed}


def test_a_task_without_networks_names_no_node() -> None:
    assert ProbeTask([], {0: 0, 1: 0}, "token").to_dict(2)[1] == {"networks": [], "ports": {}, "token": "token"}
