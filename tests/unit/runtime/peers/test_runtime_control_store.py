"""What agents exchange: signs of life, requests to stop, and messages that belong to a round."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.interruption.exit_report import StopRequest
from slurmtrain.runtime.peers import control_store
from slurmtrain.runtime.peers.control_store import NODE_SILENCE_S, ControlStore
from slurmtrain.runtime.peers.peer_store import CoordinatorGone, MessageStore

PREEMPTED = StopRequest(cause="preempted", why="stopped by SIGTERM", at=5.0, node=1, signal="SIGTERM")
CRASH = StopRequest(cause="crash", why="rank 0 exited with code 1", at=6.0, node=0)


class Clock:
    """The monotonic clock of all agents here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(control_store.time, "monotonic", lambda: self.now)

    def pass_(self, seconds: float, *alive: ControlStore) -> None:
        """Let time pass, in which these agents show that they live."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for agent in alive:
                agent.keep_alive()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def agents(count: int) -> list[ControlStore]:
    board = MessageStore()
    controls = [ControlStore(board, node, count) for node in range(count)]
    for control in controls:
        control.begin_round(0, range(count))
    return controls


# --- being alive ----------------------------------------------------------------------------------------------------


def test_node_0_notices_silent_nodes_and_the_others_notice_node_0(clock: Clock) -> None:
    first, second, third = agents(3)
    clock.pass_(5, first, second, third)
    clock.pass_(NODE_SILENCE_S + 3, first, third)
    assert first.silent_nodes() == [1]
    assert third.silent_nodes() == []
    clock.pass_(NODE_SILENCE_S + 3, second, third)
    assert second.silent_nodes() == [0]
    assert third.silent_nodes() == [0]


def test_an_agent_that_never_came_is_silent_after_the_same_time_until_it_comes(clock: Clock) -> None:
    first, second = agents(2)
    clock.pass_(NODE_SILENCE_S - 2, first)
    assert first.silent_nodes() == []
    clock.pass_(4, first)
    assert first.silent_nodes() == [1]
    clock.pass_(3, first, second)
    assert first.silent_nodes() == []


def test_an_agent_that_was_suspended_takes_nobody_for_silent_until_it_has_listened_again(clock: Clock) -> None:
    first, second = agents(2)
    clock.pass_(5, first, second)
    clock.now += 10 * NODE_SILENCE_S
    first.keep_alive()
    assert first.silent_nodes() == []
    clock.pass_(NODE_SILENCE_S + 3, first)
    assert first.silent_nodes() == [1]


def test_nobody_waits_for_lost_nodes(clock: Clock) -> None:
    first, second, third = agents(3)
    clock.pass_(2, first, second, third)
    clock.pass_(NODE_SILENCE_S + 3, first, third)
    first.drop_nodes([1])
    assert first.silent_nodes() == []
    third.publish("here/2", {})
    first.gather("here", give_up=lambda: False)
    clock.pass_(NODE_SILENCE_S + 3, first, third)
    assert first.silent_nodes() == []
    assert first.stop_request() is None


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_a_stop_request_reaches_all_nodes_and_the_first_one_stands() -> None:
    nodes = agents(3)
    assert [node.stop_request() for node in nodes] == [None, None, None]
    nodes[1].publish_stop(PREEMPTED)
    nodes[0].publish_stop(CRASH)
    assert [node.stop_request() for node in nodes] == [PREEMPTED, PREEMPTED, PREEMPTED]


@pytest.mark.usefixtures("clock")
def test_a_stop_request_holds_for_its_round_only() -> None:
    nodes = agents(2)
    nodes[1].publish_stop(PREEMPTED)
    for node in nodes:
        node.begin_round(1, [0, 1])
    assert [node.stop_request() for node in nodes] == [None, None]
    nodes[0].publish_stop(CRASH)
    assert nodes[1].stop_request() == CRASH


def test_a_node_with_ranks_that_falls_silent_stops_the_others(clock: Clock) -> None:
    first, second = agents(2)
    clock.pass_(2, first, second)
    clock.pass_(NODE_SILENCE_S + 3, first)
    request = first.stop_request()
    assert request is not None
    assert (request.cause, request.node, request.signal) == ("node_fail", 1, None)
    assert request.why == f"node 1 has not sent a heartbeat for {NODE_SILENCE_S:.0f} s"


def test_a_spare_node_that_falls_silent_stops_nobody(clock: Clock) -> None:
    first, second, third = agents(3)
    for control in (first, second, third):
        control.begin_round(0, [0, 1])
    clock.pass_(2, first, second, third)
    clock.pass_(NODE_SILENCE_S + 3, first, second)
    assert first.silent_nodes() == [2]
    assert first.stop_request() is None
    first.begin_round(1, [0, 2])
    assert first.stop_request() is not None


# --- meeting --------------------------------------------------------------------------------------------------------


def test_a_wait_ends_when_the_agent_gives_up() -> None:
    first, second = agents(2)
    first.gather("here", give_up=lambda: True)
    assert second.read("here/1") is None
    # What was said in the round before does not count.
    second.publish("here/1", {})
    for control in (first, second):
        control.begin_round(1, [0, 1])
    looks = iter([False, False, False, True])
    first.gather("here", give_up=lambda: next(looks))
    assert list(looks) == []


# --- messages -------------------------------------------------------------------------------------------------------


def test_a_message_holds_for_its_round_and_replaces_the_one_before() -> None:
    first, second = agents(2)
    assert second.read("begin") is None
    first.publish("begin", {"port": 1, "resume_from": "ü", "mlflow_run_id": "m"})
    first.publish("begin", {"port": 2, "resume_from": None, "mlflow_run_id": None})
    assert second.read("begin") == {"port": 2, "resume_from": None, "mlflow_run_id": None}
    for control in (first, second):
        control.begin_round(1, [0, 1])
    assert second.read("begin") is None


# --- without node 0 -------------------------------------------------------------------------------------------------


class BrokenLink(MessageStore):
    """The link of a node whose node 0 is gone."""

    def read(self, key: str) -> Any:
        raise CoordinatorGone(key)

    def beat(self, node: int, count: int) -> None:
        raise CoordinatorGone(node, count)

    def publish(self, key: str, message: Any, *, first: bool = False) -> None:
        raise CoordinatorGone(key, message, first)


def test_a_node_without_node_0_is_asked_to_stop_and_nothing_else_fails() -> None:
    orphan = ControlStore(BrokenLink(), 1, 2)
    request = orphan.stop_request()
    assert request is not None
    assert (request.cause, request.why, request.node) == ("node_fail", "node 0 no longer answers", 0)
    orphan.keep_alive()
    orphan.publish("ended/1", {})
    orphan.publish_stop(PREEMPTED)
    orphan.gather("left", give_up=lambda: False)
    with pytest.raises(CoordinatorGone):
        orphan.read("next")
