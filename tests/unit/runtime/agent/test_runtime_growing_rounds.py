"""Rounds that end because nodes of another job can join, or leave: agents in threads, as in test_runtime_rounds.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_agents import CRASH, POLL_S, WAIT, Ranks, World
from helpers.site import until

from slurmtrain.model.interruption.exit_report import KernelEvidence
from slurmtrain.model.interruption.growth_policy import Newcomer, Stage
from slurmtrain.runtime.agent import node_round, rounds
from slurmtrain.runtime.peers import control_store

Make = Callable[..., World]
NEW = Newcomer(number=4, host="n4", job_id="8", job_nodes=1)


class Growth:
    """What gets more nodes: those that a test says."""

    def __init__(self) -> None:
        self.waiting: list[Newcomer] = []
        self.admitted: Stage | None = None
        self.gone: list[tuple[str, ...]] = []

    def ranks_started(self, nodes: int) -> None:
        pass

    def ranks_began(self, seconds: float) -> None:
        pass

    def take_events(self) -> list[Any]:
        return []

    def newcomers(self) -> list[Newcomer]:
        return self.waiting

    def admit(self, stage: Stage) -> None:
        self.admitted = stage

    def nodes_left(self, job_id: str, hosts: list[str]) -> None:
        self.gone.append((job_id, *hosts))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a world with a run of up to three nodes."""
    worlds: list[World] = []

    def build(nodes: int, script: Mapping[tuple[int, int], str], **more: Any) -> World:
        world = World(tmp_path, {"nodes": {"min": 1, "max": nodes}, "grow": True}, script, growth=Growth(), **more)
        worlds.append(world)
        monkeypatch.setattr(Ranks, "world", world, raising=False)
        return world

    monkeypatch.setattr(node_round, "Workers", Ranks)
    monkeypatch.setattr(rounds, "_POLL_S", POLL_S)
    monkeypatch.setattr(control_store, "_POLL_S", POLL_S)
    monkeypatch.setattr(node_round.KernelState, "changes", lambda _state: KernelEvidence())
    yield build
    for world in worlds:
        world.over.set()


def test_ranks_stop_for_a_node_that_can_join_and_all_agents_go_on_to_the_same_stage(make: Make) -> None:
    world = make(2, {(0, 0): WAIT, (0, 1): WAIT}).begin()
    world.until_running(0, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    stage = world.outcomes[0]
    assert stage == world.outcomes[1] == world.growth.admitted
    assert (stage.roster, stage.hosts, stage.jobs) == ((0, 1, 4), ("n0", "n1", "n4"), ("", "", "8"))
    assert (stage.round, stage.before) == (1, (0, 1))
    [restart] = world.events("restart")
    assert (restart["cause"], restart["why"], restart["reached"]) == ("grow", "n4 can join", 5)
    # It is no failure: the policy never hears of it.
    assert "past" not in restart
    assert restart["joined"] == [4]
    [joined] = world.events("nodes_joined")
    assert (joined["job_id"], joined["hosts"], joined["nodes"]) == ("8", ["n4"], 2)


def test_ranks_start_again_where_they_are_if_the_node_has_left_meanwhile(make: Make) -> None:
    world = make(2, {(0, 0): WAIT, (0, 1): WAIT})
    world.when_ended = lambda: setattr(world.growth, "waiting", [])
    world.begin().until_running(0, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    assert world.causes() == {0: "completed", 1: "completed"}
    assert [event["members"] for event in world.events("restart")] == [[0, 1]]
    assert (world.growth.admitted, world.events("nodes_joined")) == (None, [])


def test_a_signal_that_comes_while_ranks_stop_for_a_node_ends_the_attempt(make: Make) -> None:
    world = make(2, {(0, 0): WAIT, (0, 1): WAIT})
    world.when_ended = world.signal
    world.begin().until_running(0, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    assert world.root == ("preempted", "stopped by SIGTERM")
    assert world.growth.admitted is None


def test_a_failure_restarts_ranks_before_a_node_joins(make: Make) -> None:
    world = make(2, {(0, 0): WAIT, (0, 1): CRASH, (1, 0): WAIT, (1, 1): WAIT}).begin()
    world.until_running(1, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    assert [event["cause"] for event in world.events("restart")] == ["crash", "grow"]
    assert (world.outcomes[0].restarts, world.outcomes[0].round) == (1, 2)


def test_the_run_goes_on_without_nodes_of_another_job_that_is_preempted(make: Make) -> None:
    stage = Stage(round=1, roster=(0, 4), hosts=("n0", "n4"), jobs=("", "8"), before=(0,))
    world = make(2, {(1, 0): WAIT, (1, 1): WAIT}, stage=stage).begin()
    world.until_running(1, 0, 1)
    world.signal(1)
    world.end()
    assert world.causes() == {0: "completed", 1: "preempted"}
    [restart] = world.events("restart")
    # By the numbers of the agents, after which their journals are named.
    assert (restart["members"], restart["lost"], restart["cause"]) == ([0], [4], "preempted")
    assert [event["job_id"] for event in world.events("nodes_left")] == ["8"]
    assert world.growth.gone == [("8", "n1")]
    assert world.rounds_of(0) == [1, 2]


def test_a_preemption_of_its_own_job_ends_the_attempt_on_all_nodes(make: Make) -> None:
    stage = Stage(round=1, roster=(0, 4), hosts=("n0", "n4"), jobs=("", "8"), before=(0,))
    world = make(2, {(1, 0): WAIT, (1, 1): WAIT}, stage=stage).begin()
    world.until_running(1, 0, 1)
    world.signal(0)
    world.end()
    assert world.causes() == {0: "preempted", 1: "preempted"}
    assert world.events("restart") == []
    until(lambda: not any(thread.is_alive() for thread in world.threads.values()), "the end of all agents")
