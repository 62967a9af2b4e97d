"""Which ends of attempts count as interruptions."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs import RunBuilder

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.interruption.statistics import ANNOUNCED, UNNOTICED, AttemptSpan, add, kind
from slurmtrain.model.run.run import CAUSES


def failed(**said: Any) -> dict[str, Any]:
    """One rank's failure, as a node agent journals it."""
    return {"rank": 0, "pid": 1, "exit_code": 1, "signal": None, "at": 1.0, "error": None, "last_lines": [], **said}


@pytest.mark.parametrize(
    ("cause", "counted"),
    [
        ("node_fail", UNNOTICED), ("lost", UNNOTICED), ("hang", UNNOTICED), ("preempted", ANNOUNCED),
        ("timeout", ANNOUNCED), ("completed", None), ("cancelled", None), ("preflight", None), ("oom", None),
        ("crash", None), (None, None),
    ],
)  # fmt: skip
def test_what_an_attempt_ended_for_decides_whether_it_was_interrupted(cause: str | None, counted: str | None) -> None:
    assert kind(cause) == counted


def test_of_every_cause_it_is_decided() -> None:
    decided = {
        "node_fail",
        "lost",
        "hang",
        "preempted",
        "timeout",
        "completed",
        "cancelled",
        "preflight",
        "oom",
        "crash",
    }
    assert set(CAUSES) == decided


@pytest.mark.parametrize(
    "failure",
    [
        failed(exit_code=None, signal="SIGKILL"),
        failed(exit_code=None, signal="SIGBUS"),
        failed(error="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        failed(error="DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21"),
        failed(error="OSError: [Errno 5] Input/output error: '/data/x'"),
        failed(
            exit_code=None,
            signal="SIGABRT",
            last_lines=["[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "Aborted"],
        ),
        failed(last_lines=["RuntimeError: [gloo] Connection reset by peer [10.0.0.1]:5"]),
    ],
)
def test_a_crash_that_comes_from_outside_the_program_is_an_interruption(failure: dict[str, Any]) -> None:
    assert kind("crash", [failure]) == UNNOTICED


@pytest.mark.parametrize(
    "failure",
    [
        failed(error="ValueError: loss is nan"),
        failed(error="torch.OutOfMemoryError: CUDA out of memory"),
        failed(error="DistBackendError: NCCL error: invalid usage"),
        failed(exit_code=None, signal="SIGSEGV"),
        failed(exit_code=3, last_lines=["Traceback", "KeyError: 'lr'"]),
        failed(last_lines=["connection reset by peer", *["later"] * 8]),
    ],
)
def test_a_crash_of_the_programs_own_says_nothing_of_where_it_ran(failure: dict[str, Any]) -> None:
    assert kind("crash", [failure]) is None


def test_the_rank_that_failed_first_decides() -> None:
    followed = failed(error="RuntimeError: Connection closed by peer")
    assert kind("crash", [failed(error="ValueError"), followed]) is None
    assert kind("crash", [followed, failed(error="ValueError")]) == UNNOTICED


def test_a_history_grows_by_what_attempts_have_lived_through() -> None:
    seen = add(
        InterruptionStats(uptime_s=10.0, interruptions=1, grace_s=5.0),
        [
            AttemptSpan(100.0, "node_fail"),
            AttemptSpan(50.0, "preempted"),
            AttemptSpan(25.0, None),
            AttemptSpan(-3.0, "completed"),
        ],
    )
    assert seen == InterruptionStats(uptime_s=185.0, interruptions=2, announced=1, grace_s=5.0)


def test_what_a_run_has_been_through_is_told_by_its_attempts() -> None:
    story = RunBuilder().submitted().started().later(100)
    story.observed(story.slurm("NODE_FAIL"))
    [attempt] = story.run.attempts
    assert kind(attempt.cause, attempt.failures) == UNNOTICED
    story = RunBuilder().submitted().started().stopped()
    story.observed(story.slurm("PREEMPTED"))
    [attempt] = story.run.attempts
    assert kind(attempt.cause, attempt.failures) == ANNOUNCED
