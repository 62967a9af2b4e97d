"""What nodes ask each other before they decide that the run hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.runtime.agent import hang
from slurmtrain.runtime.agent.hang import HangInquiry, HangVerdict, Suspicion
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.store import MessageStore

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
        monkeypatch.setattr(hang.time, "monotonic", lambda: self.now)
        # At once, instead of in a thread.
        monkeypatch.setattr(hang._Examination, "start", lambda thread: thread.run())
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


def test_without_a_suspicion_nothing_is_asked(nodes: Nodes) -> None:
    assert nodes.turn() == {}
    assert nodes.examined == []


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


def test_each_suspicion_is_decided_anew(nodes: Nodes) -> None:
    assert not nodes.turn(asks=0)[0].hangs
    assert nodes.turn() == {}
    nodes.states[1] = STUCK
    assert nodes.turn(asks=1)[0].hangs
    assert sorted(nodes.examined) == [0, 0, 1, 1]


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
