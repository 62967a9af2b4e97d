"""Why the workers of a node ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from slurmtrain.model.interruption.exit_report import STOPPED, Exit, ExitReport, StopRequest, decide


def exited(rank: int, code: int, at: float = 100.0, **more: Any) -> Exit:
    return Exit(rank=rank, pid=1000 + rank, code=code, at=at, **more)


STOP = StopRequest(cause="preempted", why="SIGUSR2", at=50.0, node=0)


def test_workers_that_all_exit_with_zero_have_completed() -> None:
    assert decide([exited(0, 0), exited(1, 0)], None, 0) == ExitReport(cause="completed", reason="")


def test_the_first_worker_to_fail_is_the_cause_and_all_failures_are_told() -> None:
    exits = [exited(0, -signal.SIGTERM, 102.0), exited(1, 3, 101.0, last_lines=["a", "ValueError: no", " "])]
    ending = decide(exits, None, 0)
    assert (ending.cause, ending.failed_at) == ("crash", 101.0)
    assert ending.reason == "rank 1 exited with code 3: ValueError: no"
    assert [failure["rank"] for failure in ending.failures] == [1, 0]


def test_the_time_of_an_exception_counts_not_that_of_the_exit() -> None:
    early = exited(1, 1, 110.0, raised=(100.5, "RuntimeError: boom"), last_lines=["something else"])
    ending = decide([exited(0, 1, 101.0), early], None, 0)
    assert ending.reason == "rank 1 exited with code 1: RuntimeError: boom"
    assert ending.failed_at == 100.5


def test_a_worker_that_was_killed_is_told_with_the_signals_name() -> None:
    ending = decide([exited(0, -signal.SIGKILL)], None, 0)
    assert ending.reason == "rank 0 was killed by SIGKILL"
    [failure] = ending.failures
    assert (failure["signal"], failure["exit_code"]) == ("SIGKILL", None)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert exited(0, -100).describe() == "rank 0 was killed by signal 100"


@pytest.mark.parametrize("codes", [(STOPPED, STOPPED), (STOPPED, 0), (1, STOPPED), (-signal.SIGKILL, 3)])
def test_what_workers_exit_with_after_a_request_follows_from_it(codes: tuple[int, int]) -> None:
    ending = decide([exited(rank, code) for rank, code in enumerate(codes)], STOP, 0)
    assert ending == ExitReport(cause="preempted", reason="SIGUSR2", failed_at=50.0)


def test_the_reason_lies_with_the_node_that_has_it() -> None:
    assert decide([exited(0, STOPPED)], STOP, 1) == ExitReport(cause="preempted", reason="SIGUSR2", failed_at=None)


def test_work_that_was_done_in_spite_of_a_request_is_completed() -> None:
    assert decide([exited(0, 0), exited(1, 0)], STOP, 0).cause == "completed"


def test_a_failure_before_the_request_is_the_cause() -> None:
    ending = decide([exited(0, 1, 49.0), exited(1, STOPPED, 60.0)], STOP, 0)
    assert (ending.cause, ending.failed_at) == ("crash", 49.0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_worker_that_the_same_signal_reached_first_has_not_failed(signum: signal.Signals) -> None:
    assert decide([exited(0, -signum, 49.9)], STOP, 0).cause == "preempted"


def test_workers_that_stopped_cleanly_without_a_request_were_cancelled() -> None:
    ending = decide([exited(0, STOPPED), exited(1, 0)], None, 0)
    assert ending.cause == "cancelled"
    assert ending.failed_at is None


def test_a_rank_that_lost_its_peer_is_not_blamed_even_if_it_was_noticed_first() -> None:
    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker hanging"
    killed = Exit(rank=1, pid=11, code=-9, at=20.0)
    witness = Exit(rank=0, pid=10, code=1, at=19.0, raised=(18.0, lost))
    plain_witness = Exit(rank=2, pid=12, code=1, at=18.5, last_lines=[lost])
    ending = decide([witness, plain_witness, killed], None, 0)
    assert ending.reason == "rank 1 was killed by SIGKILL"
    assert not ending.cascade
    assert decide([witness], None, 0).cascade


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGABRT, 1])
def test_a_rank_that_lost_its_peer_is_not_blamed_however_it_then_ended(code: int) -> None:
    lost = "RuntimeError: Read error. This is typically caused by a remote worker hanging or bugs in the application."
    witness = exited(0, code, 19.0, raised=(18.0, lost))
    assert decide([witness, exited(1, -signal.SIGKILL, 20.0)], None, 0).reason == "rank 1 was killed by SIGKILL"


def test_a_watchdog_that_aborts_over_a_lost_peer_is_not_blamed() -> None:
    witness = exited(0, -signal.SIGABRT, 19.0, last_lines=["ncclRemoteError: a call failed possibly due to a peer"])
    assert decide([witness, exited(1, 3, 20.0)], None, 0).reason == "rank 1 exited with code 3"
    assert not exited(0, -signal.SIGKILL, last_lines=["broken pipe"]).cascade
