"""Watching the ranks of a node by their beats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slurmtrain.model.diagnosis.hang import NEVER, Beat, Phase, RankState
from slurmtrain.model.run.events.agent_events import JobSuspended
from slurmtrain.runtime.agent import hang_watch
from slurmtrain.runtime.agent.hang_watch import HangInquiry, HangVerdict, SuspensionWatch, Suspicion, Watchdog
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.peer_store import MessageStore


@dataclass
class Node:
    """Two ranks of global numbers 4 and 5, their agent, and the clock of their machine."""

    hang_after: float | None = None
    clock: float = 1000.0
    reads: int = 0
    beats: list[Beat] = field(default_factory=lambda: [NEVER, NEVER])

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self, [4, 5], self.hang_after, 0, now=lambda: self.clock)

    def read(self) -> list[Beat]:
        self.reads += 1
        return list(self.beats)

    def beat(self, local: int, step: int, phase: Phase = Phase.TRAINING, step_s: float = 0.1) -> None:
        self.beats[local] = Beat(step, phase, self.clock, step_s, own_s=step_s / 2, pid=99)

    def wait(self, seconds: float, look_s: float = 1.0) -> Suspicion | None:
        """Let time pass with a look each ``look_s`` seconds, until one tells of a hang."""
        until = self.clock + seconds
        while self.clock < until:
            self.clock += look_s
            if suspicion := self.watchdog.look():
                return suspicion
        return None


def training(hang_after: float | None = None, step_s: float = 0.1) -> Node:
    node = Node(hang_after)
    for step in range(1, 6):
        node.beat(0, step, step_s=step_s)
        node.beat(1, step, step_s=step_s)
        assert node.wait(1) is None
    return node


def test_a_rank_that_finishes_no_step_hangs() -> None:
    node = training()
    for _ in range(70):
        node.beat(0, node.beats[0].step + 1)
        if suspicion := node.wait(1):
            break
    assert suspicion is not None
    assert (suspicion.why, suspicion.limit_s) == ("rank 5 did not finish a step for 60 s", 60)
    assert 60 < node.clock - node.beats[1].at <= 62


def test_a_raised_limit_is_twice_as_long_and_stays_but_not_for_ever() -> None:
    node = training(hang_after=10.0)
    for limit_s in (10, 20, 40, 80, 80):
        suspicion = node.wait(100)
        assert suspicion is not None
        assert (suspicion.limit_s, suspicion.most_s) == (limit_s, 80)
        assert limit_s < node.clock - node.beats[0].at <= limit_s + 2
        node.watchdog.raise_limits()
    node.beat(0, 6)
    node.beat(1, 6)
    assert node.wait(79) is None


def test_ranks_that_wait_for_a_pause_are_excused_but_not_the_pause_itself() -> None:
    node = training(hang_after=5.0)
    node.beats[0] = Beat(5, Phase.PAUSED, node.clock, pause_s=20.0, pid=99)
    suspicion = node.wait(10)
    assert suspicion is not None
    assert suspicion.why.startswith("rank 5 ")
    assert list(node.watchdog.pauses()) == [4]
    for _ in range(6):
        assert node.watchdog.excuse(node.clock)
        assert not node.watchdog.excuse(node.clock)
        suspicion = node.wait(5)
    assert suspicion is not None
    assert suspicion.why == "rank 4 did not finish a step for 20 s"
    assert node.watchdog.pauses() == {}


def test_ranks_that_are_not_in_their_loop_never_hang() -> None:
    node = training(hang_after=3.0)
    node.beat(0, 5, Phase.READY)
    node.beats[1] = NEVER
    assert node.wait(1000) is None


def test_an_agent_that_was_stopped_itself_counts_anew() -> None:
    node = training(hang_after=60.0)
    node.clock += 600
    assert node.wait(59) is None
    assert node.wait(5) is not None


def test_a_pause_of_the_whole_job_is_journaled_and_a_late_look_is_none() -> None:
    clock, journaled = [100.0], []
    watch = SuspensionWatch(journaled.append, now=lambda: clock[0])
    for seconds in (1.0, 4.0, 60.0, 1.0):
        clock[0] += seconds
        watch.look()
    [event] = journaled
    assert isinstance(event, JobSuspended)
    assert 55.0 < time.time() - event.since < 65.0


# --- what all ranks are doing -----------------------------------------------------------------------------------------


WAITING = RankState(
    0, 0, 10, Phase.TRAINING, 61.0, "S", ("/t/torch/distributed/distributed_c10d.py:1 all_reduce",), 0.0
)
COMPUTING = RankState(1, 1, 10, Phase.TRAINING, 61.0, "R", ("/w/eval.py:7 evaluate",), 0.9)
STUCK = RankState(1, 1, 10, Phase.TRAINING, 61.0, "S", ("/w/eval.py:9 read",), 0.0)


class Nodes:
    """Two nodes of one rank each, whose clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.examined: list[int] = []
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now)
        # At once, instead of in a thread.
        monkeypatch.setattr(hang_watch._Examination, "start", lambda thread: thread.run())
        board = MessageStore()
        self.states = {0: WAITING, 1: COMPUTING}
        self.inquiries = {}
        for node in (0, 1):
            control = ControlStore(board, node, 2)
            control.begin_round(0, (0, 1))
            self.inquiries[node] = HangInquiry(node, (0, 1), control, self.examiner(node))

    def examiner(self, node: int) -> Callable[[], list[RankState]]:
        def examine() -> list[RankState]:
            self.examined.append(node)
            return [self.states[node]]

        return examine

    def turn(self, *nodes: int, asks: int | None = None, limit_s: float = 60.0) -> dict[int, HangVerdict]:
        """Let nodes advance until nothing is new, for 3 s; ``asks``: the one that suspects a hang."""
        verdicts = {}
        for _ in range(3):
            self.now += 1.0
            for node in nodes or (0, 1):
                why = Suspicion(node=node, why="rank 0 finished no step", limit_s=limit_s, most_s=480.0)
                if verdict := self.inquiries[node].advance(why if node == asks else None):
                    verdicts[node] = verdict
                    asks = None
        return verdicts


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


@pytest.mark.parametrize("asks", [0, 1])
def test_all_nodes_learn_that_the_rank_that_others_wait_for_computes(nodes: Nodes, asks: int) -> None:
    verdicts = nodes.turn(asks=asks)
    assert sorted(verdicts) == [0, 1]
    for verdict in verdicts.values():
        assert not verdict.hangs
        assert verdict.suspicion.node == asks
        assert list(verdict.computing) == [1]
        assert verdict.why == "rank 1 (node 1) computes: eval.py:7 evaluate"
    assert sorted(nodes.examined) == [0, 1]


def test_the_run_hangs_if_that_rank_waits_as_well(nodes: Nodes) -> None:
    nodes.states[1] = STUCK
    assert [verdict.hangs for verdict in nodes.turn(asks=0).values()] == [True, True]


def test_the_run_hangs_if_ranks_have_computed_for_as_long_as_they_may(nodes: Nodes) -> None:
    assert [verdict.hangs for verdict in nodes.turn(asks=0, limit_s=480.0).values()] == [True, True]


def test_two_nodes_that_ask_at_once_begin_one_inquiry(nodes: Nodes) -> None:
    nodes.now += 1.0
    for node in (0, 1):
        why = Suspicion(node=node, why="", limit_s=60.0, most_s=480.0)
        nodes.inquiries[node].advance(why)
    verdicts = nodes.turn()
    assert {verdict.suspicion.node for verdict in verdicts.values()} == {0}
    assert sorted(nodes.examined) == [0, 1]


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever(nodes: Nodes) -> None:
    assert nodes.turn(0, asks=0) == {}
    nodes.now += 10.0
    assert nodes.turn(0) == {}
    nodes.now += 10.0
    # Of the only rank that is known, it is known that it waits.
    assert nodes.turn(0)[0].hangs


def test_if_node_0_takes_no_part_the_node_that_asks_decides(nodes: Nodes) -> None:
    # Its ranks have ended: it only waits for the end of the others.
    nodes.states[1] = STUCK
    assert nodes.turn(1, asks=1) == {}
    nodes.now += 15.0
    assert nodes.turn(1) == {}
    nodes.now += 5.0
    assert nodes.turn(1)[1].hangs


def test_nothing_waits_for_an_examination_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def examine() -> list[RankState]:
        may_end.wait()
        return [WAITING]

    control = ControlStore(MessageStore(), 0, 1)
    inquiry = HangInquiry(0, (0,), control, examine)
    why = Suspicion(node=0, why="", limit_s=60.0, most_s=480.0)
    assert inquiry.advance(why) is None
    may_end.set()
    verdict = None
    while verdict is None:
        verdict = inquiry.advance(None)
    assert verdict.hangs
