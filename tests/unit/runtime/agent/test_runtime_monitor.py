"""Watching the ranks of a node through one round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.model.diagnosis.hang import LOOKS, NEVER, Beat, Phase
from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.model.interruption.members import Stage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.agent import hang_watch, monitor
from slurmtrain.runtime.agent.monitor import RankMonitor, Separation
from slurmtrain.runtime.agent.node_round import RoundConfig
from slurmtrain.runtime.agent.workers import RankPlacement
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import MessageStore
from slurmtrain.system.journal import Journal

_COMPARE_S = 10.0
Make = Callable[..., "Node"]


class Beats:
    """A board whose beats are set by the test."""

    def __init__(self, count: int) -> None:
        self.beats = [NEVER] * count

    def read(self) -> list[Beat]:
        return list(self.beats)


class Node:
    """One node of a round, whose clock stands still."""

    def __init__(self, path: Path, board: MessageStore, node: int, members: Sequence[int], per_node: int) -> None:
        self.board = Beats(per_node)
        self.attempt = RunDir(path).attempt("7", 0)
        self.attempt.path.mkdir(parents=True, exist_ok=True)
        self.path = self.attempt.node_journal(node)
        self.control = ControlStore(board, node, 8)
        self.control.begin_round(0, members)
        self.journal = Journal(self.path, durable=False)
        board: Any = self.board
        resources = {"nodes": 8, "procs_per_node": per_node}
        config = RoundConfig(
            attempt=self.attempt,
            spec=read_spec({"name": "x", "command": "true", "resources": resources}, lambda at, _: pytest.fail(at)),
            stage=Stage.first(8),
            node=node,
            job_id="7",
            restart=0,
            hosts={number: f"host{number}" for number in range(8)},
            address="127.0.0.1",
            reserved=None,
            deadline=None,
            lead_s=0.0,
        )
        placement = RankPlacement(config=config, attempt=self.attempt, members=members, port=0)
        self.monitor = RankMonitor(placement, board, self.control, self.journal)

    def beat(self, local: int, step: int, own_s: float = 0.1, phase: Phase = Phase.TRAINING) -> None:
        self.board.beats[local] = Beat(step, phase, time.monotonic(), 0.2, own_s, pid=100 + local)

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return [event for event in events if event["kind"] == kind]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(monitor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(monitor.time, "time", lambda: 1.7e9 + self.now)
        monkeypatch.setattr(hang_watch.Watchdog.__init__, "__defaults__", (lambda: self.now,))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What main threads compute, by rank; ranks are examined at once, and have no stacks."""
    shares: dict[int, float] = {}
    monkeypatch.setattr(hang_watch._Examination, "start", lambda thread: thread.run())
    monkeypatch.setattr(stacks, "collect_stacks", lambda *_: {})
    monkeypatch.setattr(stacks, "state_of", lambda _: "S")
    monkeypatch.setattr(stacks, "cpu_shares", lambda *_: dict(shares))
    return shares


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    store, nodes = MessageStore(), []

    def build(node: int = 0, members: Sequence[int] = (0,), per_node: int = 2) -> Node:
        nodes.append(Node(tmp_path, store, node, members, per_node))
        return nodes[-1]

    yield build
    for node in nodes:
        node.journal.close()


def later(clock: Clock, node: Node, seconds: float, *others: Node) -> Any:
    """Look each second, on ``others`` too; the first request of ``node`` to stop."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        # Twice, since a verdict takes two messages.
        for each in 2 * (*others, node):
            request = each.monitor.find_hang()
            if request and each is node:
                return request
    return None


# --- hangs ----------------------------------------------------------------------------------------------------------


def test_ranks_that_hang_are_named_by_their_numbers_in_the_run_on_all_nodes(make: Make, clock: Clock) -> None:
    first, node = make(0, (0, 3)), make(3, (0, 3))
    node.beat(0, 5)
    node.beat(1, 5)
    requests: dict[Node, Any] = {}
    for _ in range(70):
        clock.now += 1.0
        for each in {first, node} - requests.keys():
            if request := each.monitor.find_hang():
                requests[each] = request
    for request in (requests[first], requests[node]):
        assert (request.cause, request.node, request.signal) == ("hang", 3, None)
        assert request.why == "ranks 2, 3 did not finish a step for 60 s"


def test_the_states_of_all_ranks_of_the_node_are_journaled(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(node=1, members=(0, 1))
    calls: list[Any] = []

    def collect(pids: Any, logs: Any, beats: Any) -> dict[int, list[str]]:
        calls.append((dict(pids), {rank: path.name for rank, path in logs.items()}, sorted(beats)))
        return {2: ["/w/train.py:4 step"]}

    monkeypatch.setattr(stacks, "collect_stacks", collect)
    monkeypatch.setattr(stacks, "state_of", lambda pid: {100: "S", 201: "D"}[pid])
    node.monitor.set_pids({2: 200, 3: 201})
    node.beat(0, 5)
    clock.now += 30.0
    node.monitor.examine_hang()
    assert len(node.events("hang")) == 1
    assert calls == [({2: 200, 3: 201}, {2: "rank-2.log", 3: "rank-3.log"}, [2, 3])]
    first, second = node.monitor.states
    assert (first.rank, first.node, first.step, first.idle_s, first.state) == (2, 1, 5, 30.0, "S")
    assert first.stack == ("/w/train.py:4 step",)
    # One that was never heard of is known by what was started for it.
    assert (second.rank, second.phase, second.idle_s, second.state, second.stack) == (3, Phase.NONE, 0.0, "D", ())
    [event] = node.events("hang")
    assert [state["rank"] for state in event["ranks"]] == [2, 3]
    assert event["node"] == 1


def test_what_was_found_out_before_the_stop_is_not_found_out_again(make: Make, clock: Clock) -> None:
    node = make()
    node.monitor.set_pids({0: 200, 1: 201})
    node.beat(0, 5)
    node.beat(1, 5)
    assert later(clock, node, 100)
    states = node.monitor.states
    node.monitor.examine_hang()
    assert node.monitor.states is states
    [event] = node.events("hang")
    assert [state["rank"] for state in event["ranks"]] == [0, 1]


# --- ranks that compute, and pauses ---------------------------------------------------------------------------------


def test_ranks_that_compute_get_longer_on_all_nodes_until_they_wait(
    make: Make, clock: Clock, cpu: dict[int, float]
) -> None:
    first, second = make(0, (0, 5), per_node=1), make(5, (0, 5), per_node=1)
    for node, rank in ((first, 0), (second, 1)):
        node.monitor.set_pids({rank: 100})
        node.beat(0, 7)
    cpu[0] = cpu[1] = 0.8
    assert later(clock, first, 110, second) is None
    cpu[1] = 0.0
    request = later(clock, first, 100, second)
    assert request.why.endswith("did not finish a step for 120 s")
    [event] = first.events("hang_limit")
    assert (event["limit_s"], event["raised_s"], event["ranks"]) == (60, 120, [0, 1])
    assert second.events("hang_limit") == []


def test_ranks_wait_for_one_that_is_paused_on_another_node(make: Make, clock: Clock) -> None:
    first, second = make(0, (0, 5), per_node=1), make(5, (0, 5), per_node=1)
    first.board.beats[0] = Beat(7, Phase.PAUSED, clock.now, 0.2, pid=99, activity="evaluation", pause_s=600.0)
    second.beat(0, 7)
    assert later(clock, second, 590, first) is None
    [paused] = first.events("paused")
    assert (paused["ranks"], paused["step"], paused["activity"]) == ([0], 7, "evaluation")
    first.beat(0, 7)
    assert later(clock, second, 55, first) is None
    [resumed] = first.events("resumed")
    assert 580 < resumed["seconds"] < 595
    assert later(clock, second, 20, first).cause == "hang"


# --- stragglers -----------------------------------------------------------------------------------------------------


def paced(clock: Clock, *nodes: Node, looks: int = LOOKS) -> None:
    """As many comparisons, the ranks of all nodes going on."""
    for look in range(looks):
        for _ in range(int(_COMPARE_S)):
            clock.now += 1.0
            for node in reversed(nodes):
                for local, beat in enumerate(node.board.beats):
                    node.beat(local, 10 + look, beat.own_s)
                assert node.monitor.find_hang() is None


def test_a_slow_rank_is_named_with_its_host_wherever_it_is(make: Make, clock: Clock) -> None:
    first, second = make(0, (0, 5)), make(5, (0, 5))
    for node, own_s in ((first, 0.1), (second, 0.1)):
        node.beat(0, 1, own_s)
        node.beat(1, 1, own_s)
    second.beat(1, 1, 0.3)
    paced(clock, first, second, looks=LOOKS + 2)
    [event] = first.events("straggler")
    assert (event["rank"], event["host"], event["ratio"]) == (3, "host5", 3.0)
    assert (event["own_s"], event["median_s"]) == (0.3, 0.1)
    assert second.events("straggler") == []


# --- ranks that do not know each other --------------------------------------------------------------------------------


CONNECTED = {10: {1: ("a", "b")}, 11: {2: ("b", "a")}}
APART: dict[int, dict[int, tuple[str, str]]] = {10: {}, 11: {3: ("x", "server")}}


class Nodes:
    """What nodes publish for each other."""

    def __init__(self) -> None:
        self.messages: dict[str, Mapping[str, Any]] = {}

    def publish(self, name: str, message: Mapping[str, Any]) -> None:
        self.messages[name] = message

    def read(self, name: str) -> Mapping[str, Any] | None:
        return self.messages.get(name)

    def read_each(self, names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        return {name: self.messages[name] for name in names if name in self.messages}


class Machine:
    """A machine with two ranks, and a clock; what it writes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, metrics: Path) -> None:
        self.now = 0.0
        self.sockets = APART
        self.loaded = True
        self.why: list[str] = []
        self.nodes = Nodes()
        self.metrics = metrics / "metrics.jsonl"
        monkeypatch.setattr(monitor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(monitor, "read_table", dict)
        monkeypatch.setattr(monitor, "descend", lambda *_: [])
        monkeypatch.setattr(monitor, "has_loaded", lambda *_: self.loaded)
        monkeypatch.setattr(monitor, "sockets_of", lambda pid: {*self.sockets[pid]})
        monkeypatch.setattr(
            monitor, "established", lambda _: {inode: e for own in self.sockets.values() for inode, e in own.items()}
        )

    def watched(self, counts: tuple[int, ...] = (2,), command: str = "") -> Separation:
        spec = SimpleNamespace(command=command, calls_launcher=bool(command), per_node=bool(command))
        placement: Any = SimpleNamespace(
            config=SimpleNamespace(node=0, spec=spec), attempt=SimpleNamespace(metrics=self.metrics),
            members=range(len(counts)), ranks=NodeRanks(counts), port=9,
        )  # fmt: skip
        nodes: Any = self.nodes
        return Separation(placement, nodes, self)  # type: ignore[arg-type]

    def write(self, event: Any) -> None:
        self.why.append(event.why)

    def run(self, watch: Separation, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            watch.look({0: 10, 1: 11})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_ranks_without_a_connection_are_journaled_once_and_when_they_have_met(machine: Machine) -> None:
    watch = machine.watched()
    machine.run(watch, 150)
    assert machine.why == []
    machine.run(watch, 400)
    [why] = machine.why
    assert why.startswith("ranks 0 and 1 have no connection to each other")
    machine.sockets = CONNECTED
    machine.run(watch, 400)
    assert machine.why == [why, ""]
    assert "together" in machine.nodes.messages


@pytest.mark.parametrize(("seconds", "is_judged"), [(20, True), (5, False)])
def test_a_short_training_is_judged_when_it_has_completed(machine: Machine, seconds: int, is_judged: bool) -> None:
    watch = machine.watched()
    machine.run(watch, seconds)
    watch.end()
    assert bool(machine.why) is is_judged
    # Steps prove that they would have met by now.
    machine.metrics.write_text("{}\n")
    machine.why.clear()
    machine.run(machine.watched(), 60)
    assert len(machine.why) == 1


def test_ranks_that_have_met_between_two_looks_are_no_news(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = machine.watched()
    machine.run(watch, 20)
    monkeypatch.setattr(monitor, "was_connected", {9: True}.get)
    watch.end()
    assert machine.why == []


def test_ranks_that_have_met_or_load_nothing_that_trains_are_no_news(machine: Machine) -> None:
    machine.sockets = CONNECTED
    watch = machine.watched()
    machine.run(watch, 600)
    watch.end()
    machine.sockets, machine.loaded = APART, False
    machine.nodes.messages.clear()
    watch = machine.watched()
    machine.run(watch, 600)
    watch.end()
    assert machine.why == []


def test_a_node_of_which_nothing_is_known_keeps_the_others_from_being_judged(machine: Machine) -> None:
    watch = machine.watched((2, 2))
    machine.run(watch, 400)
    assert machine.why == []
    machine.nodes.publish("links/1", {"ends": {"2": [["s", "t"]], "3": []}, "loaded_s": 300.0, "started": 0})
    machine.run(watch, 100)
    assert "ranks 0, 1, 2 and 3 have no connection" in machine.why[0]


def test_a_launcher_that_gives_no_rank_to_what_it_starts_is_noticed_on_a_single_node(machine: Machine) -> None:
    watch = machine.watched(command="accelerate launch train.py")
    for _ in range(400):
        machine.now += 1
        watch.look({0: 10})
    assert machine.why[0].startswith("accelerate launch has started none of the 2 ranks")
