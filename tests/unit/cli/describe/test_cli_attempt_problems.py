"""Sentences on where an attempt's time went, and what held it up."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli.describe.attempt_problems import (
    describe_evidence,
    describe_hang,
    describe_restart,
    describe_time,
    newest_lines,
)


def test_time_is_listed_in_the_order_of_an_attempt_without_kinds_that_took_none() -> None:
    spent = {"train": 3661.0, "queue": 12.4, "lost": 0.4, "stop": 0.0, "start": 59.6}
    assert describe_time(spent, 0.8666) == "queue 12s, start 1m00s, train 1h01m, goodput 87 %"
    assert describe_time({"queue": 12.0}) == "queue 12s"
    assert describe_time({}) == ""


@pytest.mark.parametrize(
    ("restart", "sentence"),
    [
        ({"cause": "crash", "reached": 18, "why": "rank 1 exited with 3"}, "crash after step 18: rank 1 exited with 3"),
        ({"cause": "node_fail", "why": "n2 is gone", "lost": [2, 5]}, "node_fail: n2 is gone; without node 2, 5"),
        ({}, "restart"),
    ],
)
def test_a_restart_in_place_has_its_cause_and_the_missing_nodes(restart: dict[str, Any], sentence: str) -> None:
    assert describe_restart(restart) == sentence


def test_a_hang_has_its_culprits_and_the_time_without_progress() -> None:
    ranks = [{"idle_s": 0.0}, {"idle_s": 63.2}, {"idle_s": 61.0}]
    hang = {"why": "rank 1 is stopped by a signal", "ranks": ranks}
    assert describe_hang(hang) == "rank 1 is stopped by a signal (no progress for 1m01s)"
    assert describe_hang({**hang, "ranks": ranks[:1]}) == "rank 1 is stopped by a signal"


def test_evidence_is_readable_and_what_is_empty_is_left_out() -> None:
    evidence = {"oom_kills": 2, "memory_limit": None, "xids": [79, 48], "gpus": [], "slurm": {"state": "COMPLETING"}}
    assert describe_evidence(evidence) == "oom_kills 2, xids 79, 48, slurm (state COMPLETING)"
    slurm = {"state": "PREEMPTED", "preempt_time": 1_700_000_000.0, "start_time": None, "time_left_s": 3_725.5}
    readable = "slurm (state PREEMPTED, preempt_time 2023-11-14 22:13, time_left 1h02m)"
    assert describe_evidence({"signal": "SIGTERM", "slurm": slurm}) == f"signal SIGTERM, {readable}"


def test_only_the_last_of_many_lines_are_shown_and_equal_ones_once() -> None:
    assert newest_lines(["a", "b", "a"]) == ["a (2 times)", "b"]
    assert newest_lines([str(i) for i in range(7)]) == ["2 earlier ones; --json shows them", "2", "3", "4", "5", "6"]
