"""Which ends of attempts count as interruptions."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.interruption.statistics import ANNOUNCED, UNNOTICED, AttemptSpan, add_attempts, interruption_kind
from slurmtrain.model.run.run import CAUSES


def failed(**fields: Any) -> dict[str, Any]:
    """One rank's failure, as a node agent journals it."""
    usual = {"rank": 0, "pid": 1, "exit_code": 1, "signal": None, "at": 1.0, "error": None, "last_lines": []}
    return {**usual, **fields}


COUNTED = {
    "node_fail": UNNOTICED, "lost": UNNOTICED, "hang": UNNOTICED, "preempted": ANNOUNCED, "timeout": ANNOUNCED,
    "completed": None, "cancelled": None, "preflight": None, "oom": None, "crash": None, "early": None,
    "upstream": None,
}  # fmt: skip


def test_the_cause_of_an_end_decides_whether_it_counts() -> None:
    assert {cause: interruption_kind(cause) for cause in CAUSES} == COUNTED
    assert interruption_kind(None) is None


@pytest.mark.parametrize(
    ("counted", "fields"),
    [
        (UNNOTICED, {"exit_code": None, "signal": "SIGKILL"}),
        (UNNOTICED, {"exit_code": None, "signal": "SIGBUS"}),
        (UNNOTICED, {"error": "RuntimeError: CUDA error: uncorrectable ECC error encountered"}),
        (UNNOTICED, {"error": "DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21"}),
        (UNNOTICED, {"error": "OSError: [Errno 5] Input/output error: '/data/x'"}),
        (UNNOTICED, {"exit_code": None, "signal": "SIGABRT", "last_lines": [
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "Aborted"]}),
        (UNNOTICED, {"last_lines": ["RuntimeError: [gloo] Connection reset by peer [10.0.0.1]:5"]}),
        # These are of the program itself.
        (None, {"error": "ValueError: loss is nan"}),
        (None, {"error": "torch.OutOfMemoryError: CUDA out of memory"}),
        (None, {"error": "DistBackendError: NCCL error: invalid usage"}),
        (None, {"exit_code": None, "signal": "SIGSEGV"}),
        (None, {"exit_code": 3, "last_lines": ["Traceback", "KeyError: 'lr'"]}),
        (None, {"last_lines": ["connection reset by peer", *["later"] * 8]}),
    ],
)  # fmt: skip
def test_a_crash_that_comes_from_outside_the_program_is_an_interruption(
    counted: str | None, fields: dict[str, Any]
) -> None:
    assert interruption_kind("crash", [failed(**fields)]) == counted


def test_the_rank_that_failed_first_decides() -> None:
    followed = failed(error="RuntimeError: Connection closed by peer")
    assert interruption_kind("crash", [failed(error="ValueError"), followed]) is None
    assert interruption_kind("crash", [followed, failed(error="ValueError")]) == UNNOTICED


def test_attempts_are_added_to_the_statistics() -> None:
    spans = ((100.0, "node_fail"), (50.0, "preempted"), (25.0, None), (-3.0, "completed"))
    before = InterruptionStats(uptime_s=10.0, interruptions=1, grace_s=5.0)
    stats = add_attempts(before, [AttemptSpan(*span) for span in spans])
    assert stats == InterruptionStats(uptime_s=185.0, interruptions=2, announced=1, grace_s=5.0)


def test_the_attempts_of_a_run_count_by_their_causes() -> None:
    builder = SimulatedRun().submitted().started().later(100)
    builder.observed(builder.slurm("NODE_FAIL"))
    [attempt] = builder.run.attempts
    assert interruption_kind(attempt.cause, attempt.failures) == UNNOTICED
    builder = SimulatedRun().submitted().started().stopped()
    builder.observed(builder.slurm("PREEMPTED"))
    [attempt] = builder.run.attempts
    assert interruption_kind(attempt.cause, attempt.failures) == ANNOUNCED
