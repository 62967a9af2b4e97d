"""Watching the ranks of a node through one round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from slurmtrain.model.diagnosis.hang import NEVER, Beat, Phase
from slurmtrain.model.diagnosis.stragglers import LOOKS
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.agent import monitor, watchdog
from slurmtrain.runtime.agent.control_store import ControlStore
from slurmtrain.runtime.agent.monitor import MonitorConfig, RankMonitor
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.heartbeat import Board
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

    def __init__(self, path: Path, store: HashStore, node: int, members: Sequence[int], per_node: int) -> None:
        self.board = Beats(per_node)
        self.attempt = RunDir(path).attempt("7", 0)
        self.attempt.path.mkdir(parents=True, exist_ok=True)
        self.path = self.attempt.node_journal(node)
        self.control = ControlStore(store, node, 8)
        self.control.begin_round(0, members)
        self.journal = Journal(self.path, durable=False)
        board: Any = self.board
        config = MonitorConfig(
            attempt=self.attempt,
            node=node,
            hosts={number: f"host{number}" for number in range(8)},
            members=members,
            ranks_per_node=per_node,
            hang_after=None,
        )
        self.monitor = RankMonitor(config, board, self.control, self.journal)

    def beat(self, local: int, step: int, own_s: float = 0.1, phase: Phase = Phase.TRAINING) -> None:
        self.board.beats[local] = Beat(step, phase, time.monotonic(), 0.2, own_s, pid=100 + local)

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return [event for event in events if event["kind"] == kind]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(monitor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog.Watchdog.__init__, "__defaults__", (lambda: self.now,))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    store, nodes = HashStore(), []

    def build(node: int = 0, members: Sequence[int] = (0,), per_node: int = 2) -> Node:
        nodes.append(Node(tmp_path, store, node, members, per_node))
        return nodes[-1]

    yield build
    for node in nodes:
        node.journal.close()


def later(clock: Clock, node: Node, seconds: float) -> Any:
    """Look each second; the first request to stop."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        if request := node.monitor.find_hang():
            return request
    return None


# --- hangs ----------------------------------------------------------------------------------------------------------


def test_ranks_that_finish_steps_do_not_hang(make: Make, clock: Clock) -> None:
    node = make()
    for step in range(100):
        node.beat(0, step)
        node.beat(1, step)
        assert later(clock, node, 2) is None


def test_a_rank_that_hangs_is_named_by_its_number_in_the_run_once(make: Make, clock: Clock) -> None:
    node = make(node=3, members=(0, 3))
    node.beat(0, 5)
    node.beat(1, 5)
    request = later(clock, node, 100)
    assert (request.cause, request.node, request.signal) == ("hang", 3, None)
    assert request.why == "ranks 2, 3 finished no step for 60 s"
    assert later(clock, node, 100) is None


def test_a_single_hanging_rank_is_named_alone(make: Make, clock: Clock) -> None:
    node = make()
    node.beat(0, 5)
    for step in range(80):
        node.beat(1, step)
        if request := later(clock, node, 1):
            break
    assert request.why == "rank 0 finished no step for 60 s"


def test_ranks_of_a_script_without_a_session_never_hang(make: Make, clock: Clock) -> None:
    assert later(clock, make(), 5_000) is None


def test_the_states_of_all_ranks_of_the_node_are_journaled(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(node=1, members=(0, 1))
    calls: list[Any] = []

    def collect(pids: Any, logs: Any, beats: Any) -> dict[int, list[str]]:
        calls.append((dict(pids), {rank: path.name for rank, path in logs.items()}, sorted(beats)))
        return {2: ["/w/train.py:4 step"]}

    monkeypatch.setattr(stacks, "collect", collect)
    monkeypatch.setattr(stacks, "state_of", lambda pid: {100: "S", 201: "D"}[pid])
    node.monitor.set_pids({2: 200, 3: 201})
    node.beat(0, 5)
    clock.now += 30.0
    node.monitor.examine_hang()
    assert calls == [({2: 200, 3: 201}, {2: "rank-2.log", 3: "rank-3.log"}, [2, 3])]
    first, second = node.monitor.states
    assert (first.rank, first.node, first.step, first.idle_s, first.state) == (2, 1, 5, 30.0, "S")
    assert first.stack == ("/w/train.py:4 step",)
    # One that was never heard of is known by what was started for it.
    assert (second.rank, second.phase, second.idle_s, second.state, second.stack) == (3, Phase.NONE, 0.0, "D", ())
    [event] = node.events("hang")
    assert [state["rank"] for state in event["ranks"]] == [2, 3]
    assert event["node"] == 1


# --- how far --------------------------------------------------------------------------------------------------------


def test_the_last_step_is_that_of_the_fastest_rank_and_unknown_without_a_heartbeat(make: Make) -> None:
    node = make()
    assert node.monitor.last_step() is None
    node.beat(0, 0)
    assert node.monitor.last_step() == 0
    node.beat(1, 7)
    assert node.monitor.last_step() == 7


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


def test_nodes_that_have_published_no_pace_are_not_compared(make: Make, clock: Clock) -> None:
    first = make(0, (0, 5))
    first.beat(0, 1, 0.1)
    first.beat(1, 1, 0.1)
    paced(clock, first, looks=LOOKS + 2)
    assert first.events("straggler") == []


def test_a_board_has_what_a_monitor_reads() -> None:
    board = Board(2)
    assert board.read() == [NEVER, NEVER]
    board.close()
