"""The rounds of an attempt, without ranks: agents in threads over one board, and ranks that end as they are told to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_agents import CRASH, HANG, LOST, OBEY, POLL_S, STUCK, WAIT, Ranks, World
from helpers.site import until

from slurmtrain.model.interruption.exit_report import KernelEvidence
from slurmtrain.model.interruption.members import Newcomer, Stage
from slurmtrain.runtime.agent import hang_watch, node_round, rounds, workers
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Pulse
from slurmtrain.runtime.peers import control_store
from slurmtrain.runtime.peers.control_store import ControlStore

Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a world. Who is silent in it is no matter of time."""
    worlds: list[World] = []

    def build(resources: Mapping[str, Any], script: Mapping[tuple[int, int], str], **more: Any) -> World:
        world = World(tmp_path, resources, script, **more)
        worlds.append(world)
        monkeypatch.setattr(Ranks, "world", world, raising=False)
        silent = lambda self: [node for node in self._beats if node in world.dead]  # noqa: E731
        monkeypatch.setattr(ControlStore, "silent_nodes", silent)
        wait_for = ControlStore.wait_for

        def noted(self: ControlStore, name: str) -> dict[str, Any] | None:
            if name == "begin":
                world.waits_for_begin.add(self._node)
            return wait_for(self, name)

        monkeypatch.setattr(ControlStore, "wait_for", noted)
        return world

    monkeypatch.setattr(node_round, "Workers", Ranks)
    monkeypatch.setattr(rounds, "_POLL_S", POLL_S)
    monkeypatch.setattr(control_store, "_POLL_S", POLL_S)
    monkeypatch.setattr(control_store, "_BEAT_S", 0.01)
    # What the kernel of this machine has noted meanwhile is not for these tests.
    monkeypatch.setattr(node_round.KernelState, "changes", lambda _state: KernelEvidence())
    monkeypatch.setattr(stacks, "collect_stacks", lambda pids, _logs, _beats: {rank: [] for rank in pids})
    monkeypatch.setattr(stacks, "state_of", lambda _pid: "S")
    yield build
    for world in worlds:
        world.over.set()


# --- one round ------------------------------------------------------------------------------------------------------


def test_all_ranks_complete_and_so_does_every_node(make: Make) -> None:
    world = make({"nodes": 2}, {}).begin().end()
    assert world.causes() == {0: "completed", 1: "completed"}
    assert world.events("restart") == []
    assert world.prepared.count((0, 1, "step-3")) == 1


@pytest.mark.parametrize("unfit", [0, 1])
def test_a_node_that_cannot_start_its_ranks_ends_the_others_and_says_why(make: Make, unfit: int) -> None:
    script = {(0, 1 - unfit): WAIT}
    world = make({"nodes": 2}, script, unfit=unfit, requeue={"restarts_in_place": 0}).begin().end()
    assert world.causes() == {0: "crash", 1: "crash"}
    assert world.root == ("crash", "cannot enter the working directory /w")
    assert world.events("restart") == []


# --- restarts in place ----------------------------------------------------------------------------------------------


def test_ranks_start_again_where_they_are_after_a_crash(make: Make) -> None:
    world = make({"nodes": 2}, {(0, 0): WAIT, (0, 1): CRASH}).begin().end()
    assert world.causes() == {0: "completed", 1: "completed"}
    [event] = world.events("restart")
    assert (event["round"], event["members"], event["cause"], event["lost"]) == (1, [0, 1], "crash", [])
    assert "ValueError: 1; rank 1 exited with code 1" in event["why"]
    assert event["past"]["reached"] == 5
    assert (event["past"]["began_at_step"], event["past"]["committed"]) == (3, 3)
    assert (world.rounds_of(0), world.rounds_of(1)) == ([0, 1], [0, 1])
    # The later round meets at a store of its own.
    first, second = world.ranks[0, 1].placement.port, world.ranks[1, 1].placement.port
    assert first == world.ranks[0, 0].placement.port
    assert second != first
    assert second == world.ranks[1, 0].placement.port


def test_ranks_are_not_started_again_more_often_than_the_spec_allows(make: Make) -> None:
    script = {(number, node): WAIT if node == 0 else CRASH for number in range(3) for node in range(2)}
    world = make({"nodes": 2}, script, requeue={"restarts_in_place": 1, "max_failures": 9}).begin().end()
    assert [event["round"] for event in world.events("restart")] == [1]
    assert world.causes() == {0: "crash", 1: "crash"}
    assert world.root[1].startswith("ValueError: 1; rank 1 exited with code 1")
    # Node 0's own end follows from the other's.
    report = world.outcomes[0].node_report  # type: ignore[union-attr]
    assert report.failed_at is None


def test_a_signal_to_one_node_alone_stops_all(make: Make) -> None:
    world = make({"nodes": 3}, {(0, node): WAIT for node in range(3)}).begin()
    world.until_running(0, 0, 1, 2)
    world.signal(1, number=signal.SIGUSR2)
    world.end()
    assert world.causes() == {0: "timeout", 1: "timeout", 2: "timeout"}
    assert world.events("restart") == []
    assert [event["signal"] for event in world.events("stopping")] == ["SIGUSR2"]


def test_a_signal_that_comes_when_ranks_have_failed_already_starts_nothing_again(make: Make) -> None:
    world = make({"nodes": 2}, {(0, 0): WAIT, (0, 1): CRASH})
    world.when_ended = lambda: world.signal(0)
    world.begin().end()
    assert world.events("restart") == []
    assert world.root[0] == "crash"


def test_ranks_are_asked_to_stop_before_the_time_limit_and_not_started_again(make: Make) -> None:
    world = make({"nodes": 2}, {(0, 0): WAIT, (0, 1): WAIT}, deadline=time.monotonic() + 0.2).begin().end()
    assert world.causes() == {0: "timeout", 1: "timeout"}
    assert world.events("restart") == []


# --- nodes that are lost --------------------------------------------------------------------------------------------


def test_an_elastic_run_continues_without_a_lost_node(make: Make) -> None:
    script = {(0, 0): WAIT, (0, 1): LOST, (0, 2): WAIT}
    world = make({"nodes": {"min": 2, "max": 3}}, script).begin().end()
    assert world.causes() == {0: "completed", 2: "completed"}
    [event] = world.events("restart")
    assert (event["members"], event["lost"], event["cause"]) == ([0, 2], [1], "node_fail")
    assert "n1 is gone" in event["why"]
    for node in (0, 2):
        assert world.ranks[0, node].process.signals == [signal.SIGTERM]
    # Group ranks are numbered anew.
    assert [world.ranks[1, node]._first for node in (0, 2)] == [0, 1]


def test_a_spare_node_takes_the_place_of_one_that_is_lost(make: Make) -> None:
    script = {(0, 0): WAIT, (0, 1): LOST}
    world = make({"nodes": 2, "spares": 1}, script).begin().end()
    assert world.causes() == {0: "completed", 2: "completed"}
    assert [event["members"] for event in world.events("restart")] == [[0, 2]]
    assert world.rounds_of(2) == [1]
    assert world.prepared.count((1, 2, "step-3")) == 1


def test_a_spare_node_that_is_lost_ends_no_round(make: Make) -> None:
    world = make({"nodes": 2, "spares": 1}, {(0, 0): WAIT, (0, 1): WAIT}).begin()
    world.until_running(0, 0, 1)
    world.dead.add(2)
    for node in (0, 1):
        world.ranks[0, node].process.returncode = 0
    world.end()
    assert world.causes()[0] == "completed"
    assert world.ranks[0, 0].process.signals == []


def test_too_few_nodes_end_the_attempt_and_name_the_one_that_is_gone(make: Make) -> None:
    world = make({"nodes": 3}, {(0, 0): WAIT, (0, 1): WAIT, (0, 2): LOST}).begin().end()
    assert world.causes()[0] == "node_fail"
    assert world.root == ("node_fail", "n2 is gone: its agent no longer responds")
    report = world.outcomes[0].node_report  # type: ignore[union-attr]
    assert list(report.without) == ["n2"]
    assert not report.cascade


def test_a_living_node_that_was_given_up_ends_its_ranks_and_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for node 0 to leave this round, which goes on to another.
    monkeypatch.setattr(rounds, "_LEAVING_S", 0.2)
    world = make({"nodes": {"min": 2, "max": 3}}, {(0, node): WAIT for node in range(3)}).begin()
    world.until_running(0, 0, 1, 2)
    world.dead.add(1)
    world.end()
    until(lambda: not world.threads[1].is_alive(), "the end of node 1")
    assert world.causes() == {0: "completed", 1: "node_fail", 2: "completed"}
    assert world.ranks[0, 1].process.signals == [signal.SIGTERM]
    assert world.rounds_of(1) == [0]


def test_the_others_end_when_node_0_is_gone(make: Make) -> None:
    world = make({"nodes": {"min": 2, "max": 3}, "spares": 1}, {(0, 0): LOST, (0, 1): WAIT, (0, 2): WAIT}).begin().end()
    assert world.causes() == {1: "node_fail", 2: "node_fail", 3: "node_fail"}
    for node in (1, 2, 3):
        outcome = world.outcomes[node]
        assert outcome is not None
        assert outcome.node_report.cascade


# --- hangs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangs are noticed soon; each rank beats once."""
    beat = Pulse.beat
    once = lambda self, step, phase, **times: beat(self, step, phase, **times) if not self.phase else None  # noqa: E731
    monkeypatch.setattr(Pulse, "beat", once)
    monkeypatch.setattr(hang_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(hang_watch, "hang_limit", lambda *_: 0.1)


@pytest.mark.usefixtures("quick_watchdog")
@pytest.mark.parametrize("restarts", [1, 0])
def test_a_rank_that_hangs_is_named_and_ranks_start_again_if_they_may(make: Make, restarts: int) -> None:
    requeue = {"restarts_in_place": restarts}
    world = make({"nodes": 2}, {(0, 0): WAIT, (0, 1): HANG}, requeue=requeue).begin().end()
    if not restarts:
        assert world.root == ("hang", "rank 1 (node 1) has finished 0 steps, others 5")
        assert world.causes()[0] == "hang"
        return
    [event] = world.events("restart")
    assert event["cause"] == "hang"
    assert event["why"] == "rank 1 (node 1) has finished 0 steps, others 5"
    for node in range(2):
        [hang_watch] = world.events("hang", node)
        assert [state["rank"] for state in hang_watch["ranks"]] == [node]
    assert world.causes() == {0: "completed", 1: "completed"}


@pytest.mark.usefixtures("quick_watchdog")
def test_a_node_on_which_ranks_hang_again_and_again_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {(0, 0): WAIT, (0, 1): HANG, (1, 0): WAIT, (1, 1): HANG}
    world = make({"nodes": 2, "spares": 1}, script)
    monkeypatch.setattr(World, "committed", property(lambda self: 3 + max((n for n, _ in self.ranks), default=0)))
    world.begin().end()
    assert [event["members"] for event in world.events("restart")] == [[0, 1], [0, 2]]


# --- stopped before anything began ----------------------------------------------------------------------------------


def test_a_signal_before_all_nodes_have_come_begins_nothing(make: Make) -> None:
    world = make({"nodes": 2}, {}).begin(1)
    world.signal()
    world.dead.add(1)
    world.end()
    assert world.outcomes == {0: None}
    assert world.ranks == {}


def test_a_signal_that_comes_when_only_some_nodes_have_begun_ends_those(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has seen node 1 come, which has not seen node 0 yet."""
    gather = ControlStore.gather

    def late(self: ControlStore, place: str, *, give_up: Callable[[], bool]) -> None:
        if place == "here" and self._node == 1:
            self.publish("here/1", {})
            until(give_up, "the signal")
        else:
            gather(self, place, give_up=give_up)

    monkeypatch.setattr(ControlStore, "gather", late)
    world = make({"nodes": 2}, {(0, 0): WAIT}).begin()
    world.until_running(0, 0)
    world.signal(1)
    world.end()
    assert world.outcomes[1] is None
    assert world.root == ("preempted", "stopped by SIGTERM")
    assert world.ranks[0, 0].process.signals == [signal.SIGTERM]


def test_a_rank_that_cannot_be_killed_ends_the_attempt_and_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "CRASH_GRACE_S", 0.1)
    world = make({"nodes": 2}, {(0, 0): STUCK, (0, 1): CRASH}, requeue={"restarts_in_place": 0}).begin().end()
    assert world.causes() == {0: "crash", 1: "crash"}
    [event] = world.events("leftovers")
    assert (event["killed"], event["remaining"]) == ([], ["python (pid 1)"])
    outcome = world.outcomes[0]
    assert outcome is not None
    assert outcome.node_report.reason.startswith("python (pid 1) cannot be killed")


@pytest.mark.parametrize(("exit_zero", "cause"), [("auto", "preempted"), ("completed", "completed")])
def test_ranks_that_exit_with_0_when_they_are_asked_to_stop_have_not_completed_unless_the_spec_says_so(
    make: Make, exit_zero: str, cause: str
) -> None:
    world = make({"nodes": 2}, {(0, 0): OBEY, (0, 1): OBEY}, requeue={"exit_zero": exit_zero}).begin()
    world.until_running(0, 0)
    world.until_running(0, 1)
    world.signal(1)
    world.end()
    assert world.causes() == {0: cause, 1: cause}


def test_a_run_goes_on_if_one_node_has_completed_and_another_was_stopped(make: Make) -> None:
    world = make({"nodes": 2}, {(0, 0): OBEY}).begin()
    world.until_running(0, 0)
    world.until_running(0, 1)
    world.signal(0)
    world.end()
    assert world.causes() == {0: "preempted", 1: "completed"}
    assert world.root == ("preempted", "stopped by SIGTERM")


def test_a_node_that_waits_for_node_0_to_begin_ends_as_soon_as_that_leaves(make: Make) -> None:
    world = make({"nodes": 3}, {}).begin(2)
    until(lambda: 1 in world.waits_for_begin, "node 1")
    world.signal()
    world.dead.add(2)
    world.end()
    assert world.outcomes[0] is None
    outcome = world.outcomes[1]
    assert outcome is not None
    assert (outcome.node_report.cause, outcome.node_report.signal) == ("preempted", "SIGTERM")
    assert world.ranks == {}


# --- nodes of another job join, or leave ------------------------------------------------------------------------------


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
def growing(make: Make) -> Make:
    """Make a world with a run that can grow to so many nodes."""

    def build(nodes: int, script: Mapping[tuple[int, int], str], **more: Any) -> World:
        return make({"nodes": {"min": 1, "max": nodes}, "grow": True}, script, growth=Growth(), **more)

    return build


def test_ranks_stop_for_a_node_that_can_join_and_all_agents_go_on_to_the_same_stage(growing: Make) -> None:
    world = growing(2, {(0, 0): WAIT, (0, 1): WAIT}).begin()
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


def test_ranks_start_again_where_they_are_if_the_node_has_left_meanwhile(growing: Make) -> None:
    world = growing(2, {(0, 0): WAIT, (0, 1): WAIT})
    world.when_ended = lambda: setattr(world.growth, "waiting", [])
    world.begin().until_running(0, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    assert world.causes() == {0: "completed", 1: "completed"}
    assert [event["members"] for event in world.events("restart")] == [[0, 1]]
    assert (world.growth.admitted, world.events("nodes_joined")) == (None, [])


def test_a_signal_that_comes_while_ranks_stop_for_a_node_ends_the_attempt(growing: Make) -> None:
    world = growing(2, {(0, 0): WAIT, (0, 1): WAIT})
    world.when_ended = world.signal
    world.begin().until_running(0, 0, 1)
    world.growth.waiting = [NEW]
    world.end()
    assert world.root == ("preempted", "stopped by SIGTERM")
    assert world.growth.admitted is None


def test_the_run_goes_on_without_nodes_of_another_job_that_is_preempted(growing: Make) -> None:
    stage = Stage(round=1, roster=(0, 4), hosts=("n0", "n4"), jobs=("", "8"), before=(0,))
    world = growing(2, {(1, 0): WAIT, (1, 1): WAIT}, stage=stage).begin()
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


def test_a_preemption_of_its_own_job_ends_the_attempt_on_all_nodes(growing: Make) -> None:
    stage = Stage(round=1, roster=(0, 4), hosts=("n0", "n4"), jobs=("", "8"), before=(0,))
    world = growing(2, {(1, 0): WAIT, (1, 1): WAIT}, stage=stage).begin()
    world.until_running(1, 0, 1)
    world.signal(0)
    world.end()
    assert world.causes() == {0: "preempted", 1: "preempted"}
    assert world.events("restart") == []
    until(lambda: not any(thread.is_alive() for thread in world.threads.values()), "the end of all agents")
