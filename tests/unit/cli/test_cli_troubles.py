"""Where an attempt's time went, and what held it up, in words."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli.troubles import (
    evidence_words,
    hang_words,
    newest,
    restart_words,
    straggler_words,
    time_words,
)


def test_time_is_told_in_the_order_in_which_an_attempt_spends_it_without_kinds_that_took_none() -> None:
    spent = {"train": 3661.0, "queue": 12.4, "lost": 0.4, "stop": 0.0, "start": 59.6}
    assert time_words(spent, 0.8666) == "queue 12s, start 1m00s, train 1h01m, goodput 87 %"
    assert time_words({"queue": 12.0}) == "queue 12s"
    assert time_words({}) == ""


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"cause": "crash", "reached": 18, "why": "rank 1 exited with 3"}, "crash after step 18: rank 1 exited with 3"),
        ({"cause": "node_fail", "why": "n2 is gone", "lost": [2, 5]}, "node_fail: n2 is gone; without node 2, 5"),
        ({}, "restart"),
    ],
)
def test_a_restart_in_place_tells_its_cause_and_who_is_missing(told: dict[str, Any], words: str) -> None:
    assert restart_words(told) == words


def test_a_hang_tells_who_is_to_blame_and_since_when_nothing_happened() -> None:
    ranks = [{"idle_s": 0.0}, {"idle_s": 63.2}, {"idle_s": 61.0}]
    told = {"why": "rank 1 is stopped by a signal", "ranks": ranks}
    assert hang_words(told) == "rank 1 is stopped by a signal (no progress for 1m01s)"
    assert hang_words({**told, "ranks": ranks[:1]}) == "rank 1 is stopped by a signal"


def test_a_straggler_is_told_with_its_host_and_what_a_step_takes_of_its_own_time() -> None:
    told = {"rank": 3, "host": "n1", "ratio": 1.8, "own_s": 0.216, "median_s": 0.12, "step": 500}
    said = "rank 3 on n1 was 1.8 times as slow as others at step 500: 216 ms of its own a step, where they took 120 ms"
    assert straggler_words(told) == said


def test_evidence_that_is_nothing_is_not_told() -> None:
    told = {"oom_kills": 2, "memory_limit": None, "xids": [79, 48], "gpus": [], "slurm": {"state": "COMPLETING"}}
    assert evidence_words(told) == "oom_kills 2, xids 79, 48, slurm (state COMPLETING)"


def test_of_many_lines_the_last_are_told_and_equal_ones_once() -> None:
    assert newest(["a", "b", "a"]) == ["a (2 times)", "b"]
    assert newest([str(i) for i in range(7)]) == ["2 earlier ones; --json shows them", "2", "3", "4", "5", "6"]
