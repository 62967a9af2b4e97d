"""Watching the ranks of a node by their beats."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slurmtrain.model.diagnosis.hang import NEVER, Beat, Phase
from slurmtrain.model.run.events.agent import JobSuspended
from slurmtrain.runtime.agent.hang import Hang, SuspensionWatch, Watchdog


@dataclass
class Node:
    """Two ranks of global numbers 4 and 5, their agent, and the clock of their machine."""

    hang_after: float | None = None
    clock: float = 1000.0
    reads: int = 0
    beats: list[Beat] = field(default_factory=lambda: [NEVER, NEVER])

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self, [4, 5], self.hang_after, now=lambda: self.clock)

    def read(self) -> list[Beat]:
        self.reads += 1
        return list(self.beats)

    def beat(self, local: int, step: int, phase: Phase = Phase.TRAINING, step_s: float = 0.1) -> None:
        self.beats[local] = Beat(step, phase, self.clock, step_s, own_s=step_s / 2, pid=99)

    def wait(self, seconds: float, look_s: float = 1.0) -> Hang | None:
        """Let time pass with a look each ``look_s`` seconds, until one tells of a hang."""
        until = self.clock + seconds
        while self.clock < until:
            self.clock += look_s
            if hang := self.watchdog.look():
                return hang
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
        if hang := node.wait(1):
            break
    assert hang is not None
    assert hang.over == (5,)
    assert hang.limit_s == 60
    assert 60 < hang.idle_s[5] <= 62
    assert hang.idle_s[4] == 1
    assert hang.beats == dict(zip((4, 5), node.beats, strict=True))


def test_a_hang_is_reported_until_it_is_over() -> None:
    node = training()
    assert node.wait(70) is not None
    assert node.wait(2) is not None
    node.beat(0, 6)
    node.beat(1, 6)
    assert node.wait(50) is None


def test_a_raised_limit_is_twice_as_long_and_stays_but_not_for_ever() -> None:
    node = training(hang_after=10.0)
    for limit_s in (10, 20, 40, 80, 80):
        hang = node.wait(100)
        assert hang is not None
        assert (hang.limit_s, hang.most_s) == (limit_s, 80)
        assert limit_s < hang.idle_s[4] <= limit_s + 2
        node.watchdog.raise_limits()
    node.beat(0, 6)
    node.beat(1, 6)
    assert node.wait(79) is None


def test_ranks_that_have_used_half_of_their_time_are_known() -> None:
    node = training()
    assert node.watchdog.half_over() == []
    for _ in range(35):
        node.beat(0, node.beats[0].step + 1)
        node.wait(1)
    assert node.watchdog.half_over() == [5]


def test_ranks_that_wait_for_a_pause_are_excused_but_not_the_pause_itself() -> None:
    node = training(hang_after=5.0)
    node.beats[0] = Beat(5, Phase.PAUSED, node.clock, pause_s=20.0, pid=99)
    hang = node.wait(10)
    assert hang is not None
    assert hang.over == (5,)
    assert list(node.watchdog.pauses()) == [4]
    for _ in range(6):
        assert node.watchdog.excuse(node.clock)
        assert not node.watchdog.excuse(node.clock)
        hang = node.wait(5)
    assert hang is not None
    assert (hang.over, hang.limit_s) == ((4,), 20)
    assert node.watchdog.pauses() == {}


def test_long_steps_have_time_by_their_median() -> None:
    node = training(step_s=20)
    node.beat(0, 6, step_s=0.1)
    assert node.wait(195) is None
    hang = node.wait(10)
    assert hang is not None
    assert hang.limit_s == 200


def test_the_first_step_and_saves_have_longer() -> None:
    node = training(hang_after=3.0)
    node.beat(0, 5, Phase.FIRST)
    node.beat(1, 5, Phase.SAVING)
    assert node.wait(29) is None
    hang = node.wait(10)
    assert hang is not None
    assert (hang.limit_s, hang.over) == (30, (4,))


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


def test_looks_come_at_most_once_a_second() -> None:
    node = training()
    before = node.reads
    node.wait(10, look_s=0.125)
    assert 8 <= node.reads - before <= 10


def test_paces_are_those_of_ranks_that_train() -> None:
    node = Node()
    assert node.watchdog.paces() == {}
    node.beat(0, 7, step_s=0.5)
    node.beat(1, 7, Phase.SAVING)
    node.wait(1)
    assert node.watchdog.paces() == {4: (7, 0.25)}


def test_a_pause_of_the_whole_job_is_journaled_and_a_late_look_is_none() -> None:
    clock, journaled = [100.0], []
    watch = SuspensionWatch(journaled.append, now=lambda: clock[0])
    for seconds in (1.0, 4.0, 60.0, 1.0):
        clock[0] += seconds
        watch.look()
    [event] = journaled
    assert isinstance(event, JobSuspended)
    assert 55.0 < time.time() - event.since < 65.0
