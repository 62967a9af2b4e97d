"""The memory in which ranks tell their agent what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.site import until

from slurmtrain.model.diagnosis.hang import NEVER
from slurmtrain.runtime.job.heartbeat import Beat, Board, Phase, Pulse

BEATS_FOR_EVER = """
import sys
from slurmtrain.runtime.job.heartbeat import Phase, Pulse
pulse = Pulse.open(sys.argv[1], int(sys.argv[2]))
step = 0
while True:
    step += 1
    pulse.beat(step, Phase.TRAINING, step_s=float(step), own_s=float(step))
"""


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(2)
    yield board
    board.close()


def test_a_beat_arrives_as_it_was_told(board: Board) -> None:
    before = time.monotonic()
    pulse = Pulse.open(board.path, 1)
    pulse.saved(7.0)
    pulse.saved(3.0)
    pulse.beat(12, Phase.TRAINING, step_s=0.5, own_s=0.25)
    first, second = board.read()
    assert first == NEVER
    assert before <= second.at <= time.monotonic()
    assert second == Beat(12, Phase.TRAINING, second.at, 0.5, 0.25, 7.0, os.getpid())
    assert pulse.phase is Phase.TRAINING


def test_a_pause_says_what_it_is_for_and_how_long_it_may_take_until_the_next_beat(board: Board) -> None:
    pulse = Pulse.open(board.path, 1)
    pulse.beat(12, Phase.TRAINING, step_s=0.5)
    pulse.pause(12, "evaluation", 300.0, step_s=0.5)
    assert pulse.phase is Phase.PAUSED
    _, paused = board.read()
    assert (paused.step, paused.phase, paused.step_s) == (12, Phase.PAUSED, 0.5)
    assert (paused.activity, paused.pause_s) == ("evaluation", 300.0)
    pulse.beat(12, Phase.TRAINING, step_s=0.5)
    assert board.read()[1] == Beat(12, Phase.TRAINING, board.read()[1].at, 0.5, pid=os.getpid())


def test_what_a_long_pause_is_for_is_cut_between_two_characters(board: Board) -> None:
    Pulse.open(board.path, 0).pause(1, "x" + "é" * 100)
    assert board.read()[0].activity == "x" + "é" * 23


def test_without_a_board_beats_go_into_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"x" * 4096)
    for path in (None, str(tmp_path / "gone"), str(tmp_path / "empty"), str(tmp_path / "other"), str(tmp_path)):
        pulse = Pulse.open(path, 0)
        pulse.beat(1, Phase.TRAINING)
        assert pulse.phase is Phase.TRAINING
        pulse.pause(1, "evaluation")
        assert pulse.phase is Phase.PAUSED
    assert (tmp_path / "other").read_bytes() == b"x" * 4096


def test_a_damaged_record_leaves_the_beat_before_it(board: Board) -> None:
    Pulse.open(board.path, 0).beat(5, Phase.TRAINING)
    before = board.read()
    with Path(board.path).open("r+b", buffering=0) as memory:
        memory.seek(64)
        memory.write(b"\xff")
    assert board.read() == before


def test_no_half_of_a_beat_is_ever_read_and_that_of_a_killed_rank_stays(board: Board) -> None:
    rank = subprocess.Popen([sys.executable, "-c", BEATS_FOR_EVER, board.path, "0"])
    try:
        until(lambda: board.read()[0].step > 0)
        beats: list[Beat] = []

        def has_been_read_often() -> bool:
            beats.extend(board.read()[0] for _ in range(1000))
            return len({beat.step for beat in beats}) > 20

        until(has_been_read_often)
        assert all(beat.step == beat.step_s == beat.own_s and beat.pid == rank.pid for beat in beats)
        assert [beat.step for beat in beats] == sorted(beat.step for beat in beats)
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        assert board.read()[0] == board.read()[0]
        assert board.read()[0].step >= beats[-1].step
    finally:
        rank.kill()
        rank.wait()
