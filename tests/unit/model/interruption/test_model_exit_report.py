"""Why the ranks of a node ended, and what amends the report of it."""

from __future__ import annotations

import signal
from dataclasses import asdict
from typing import Any

import pytest

from slurmtrain.model.interruption.exit_report import (
    NODE_0_COMPLETED,
    STOPPED,
    Evidence,
    ExclusionProblem,
    Exit,
    ExitReport,
    HangEvidence,
    KernelEvidence,
    LostNodes,
    NodeZeroCompleted,
    StopCause,
    StopRequest,
    amend,
    oom_reason,
    report_attempt,
    report_exits,
    report_signal,
    report_standby,
)

GIB = 2**30


def exited(rank: int, code: int, at: float = 100.0, **more: Any) -> Exit:
    return Exit(rank=rank, pid=1000 + rank, code=code, at=at, **more)


def test_a_limit_says_why_a_rank_ended_better_than_what_it_printed_before_a_signal() -> None:
    by_signal = exited(0, -signal.SIGXCPU, last_lines=["started"], limit="the limit of CPU time is 60 s")
    assert by_signal.describe() == "rank 0 was killed by SIGXCPU: the limit of CPU time is 60 s"
    by_error = exited(0, 1, last_lines=["can't start new thread"], limit="the limit of threads is 60")
    assert by_error.describe() == "rank 0 exited with code 1: can't start new thread; the limit of threads is 60"


STOP = StopRequest(cause="preempted", why="SIGUSR2", at=50.0, node=0)


def test_workers_that_all_exit_with_zero_have_completed() -> None:
    assert report_exits([exited(0, 0), exited(1, 0)], None, 0) == ExitReport(cause="completed", reason="")


def test_the_first_worker_to_fail_is_the_cause_and_all_failures_are_listed() -> None:
    exits = [exited(0, -signal.SIGTERM, 102.0), exited(1, 3, 101.0, last_lines=["a", "ValueError: no", " "])]
    report = report_exits(exits, None, 0)
    assert (report.cause, report.failed_at) == ("crash", 101.0)
    assert report.reason == "rank 1 exited with code 3: ValueError: no"
    assert [failure["rank"] for failure in report.failures] == [1, 0]


def test_the_time_of_an_exception_counts_not_that_of_the_exit() -> None:
    early = exited(1, 1, 110.0, raised=(100.5, "RuntimeError: boom"), last_lines=["something else"])
    report = report_exits([exited(0, 1, 101.0), early], None, 0)
    assert report.reason == "rank 1 exited with code 1: RuntimeError: boom"
    assert report.failed_at == 100.5


def test_a_killed_worker_is_described_with_the_name_of_the_signal() -> None:
    report = report_exits([exited(0, -signal.SIGKILL)], None, 0)
    assert report.reason == "rank 0 was killed by SIGKILL"
    [failure] = report.failures
    assert (failure["signal"], failure["exit_code"]) == ("SIGKILL", None)


def test_a_signal_without_a_name_is_described_by_its_number() -> None:
    assert exited(0, -100).describe() == "rank 0 was killed by signal 100"


@pytest.mark.parametrize("codes", [(STOPPED, STOPPED), (STOPPED, 0), (1, STOPPED), (-signal.SIGKILL, 3)])
def test_exit_codes_after_a_request_follow_from_it(codes: tuple[int, int]) -> None:
    report = report_exits([exited(rank, code) for rank, code in enumerate(codes)], STOP, 0)
    assert report == ExitReport(cause="preempted", reason="SIGUSR2", failed_at=50.0)


def test_only_the_node_with_the_reason_has_a_time_of_failure() -> None:
    assert report_exits([exited(0, STOPPED)], STOP, 1) == ExitReport(
        cause="preempted", reason="SIGUSR2", failed_at=None
    )


def test_work_that_was_done_in_spite_of_a_request_is_completed() -> None:
    exits = [exited(0, 0, finished=True), exited(1, 0, finished=True)]
    assert report_exits(exits, STOP, 0) == ExitReport(cause="completed", reason="")


def test_exit_code_0_after_a_request_proves_nothing() -> None:
    report = report_exits([exited(0, 0), exited(1, 0)], STOP, 0)
    assert report == ExitReport(cause="preempted", reason="SIGUSR2", failed_at=50.0)


def test_all_ranks_of_a_node_must_have_finished_their_work() -> None:
    assert report_exits([exited(0, 0, finished=True), exited(1, 0)], STOP, 0).cause == "preempted"


def test_a_rank_that_finished_its_work_and_then_failed_has_not_completed() -> None:
    assert report_exits([exited(0, 3, finished=True)], None, 0).cause == "crash"
    assert report_exits([exited(0, STOPPED, finished=True)], STOP, 0).cause == "preempted"


def test_exit_code_0_after_a_request_completes_if_the_spec_says_so() -> None:
    assert report_exits([exited(0, 0), exited(1, 0)], STOP, 0, zero_completes=True).cause == "completed"
    assert report_exits([exited(0, 0), exited(1, STOPPED)], STOP, 0, zero_completes=True).cause == "preempted"


@pytest.mark.parametrize(("at", "cause"), [(48.9, "completed"), (49.9, "preempted"), (50.1, "preempted")])
def test_exit_code_0_well_before_the_request_is_completion_but_the_same_signal_may_reach_a_rank_first(
    at: float, cause: str
) -> None:
    assert report_exits([exited(0, 0, at), exited(1, 0, 100.0, finished=True)], STOP, 0).cause == cause


def test_a_failure_before_the_request_is_the_cause() -> None:
    report = report_exits([exited(0, 1, 49.0), exited(1, STOPPED, 60.0)], STOP, 0)
    assert (report.cause, report.failed_at) == ("crash", 49.0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_worker_that_the_same_signal_reached_first_has_not_failed(signum: signal.Signals) -> None:
    assert report_exits([exited(0, -signum, 49.9)], STOP, 0).cause == "preempted"


def test_workers_that_stopped_cleanly_without_a_request_were_cancelled() -> None:
    report = report_exits([exited(0, STOPPED), exited(1, 0)], None, 0)
    assert report.cause == "cancelled"
    assert report.failed_at is None


def test_a_rank_that_lost_its_peer_is_not_blamed_even_if_it_was_noticed_first() -> None:
    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker hanging"
    killed = Exit(rank=1, pid=11, code=-9, at=20.0)
    witness = Exit(rank=0, pid=10, code=1, at=19.0, raised=(18.0, lost))
    plain_witness = Exit(rank=2, pid=12, code=1, at=18.5, last_lines=[lost])
    report = report_exits([witness, plain_witness, killed], None, 0)
    assert report.reason == "rank 1 was killed by SIGKILL"
    assert not report.cascade
    assert report_exits([witness], None, 0).cascade


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGABRT, 1])
def test_a_rank_that_lost_its_peer_is_not_blamed_however_it_then_ended(code: int) -> None:
    lost = "RuntimeError: Read error. This is typically caused by a remote worker hanging or bugs in the application."
    witness = exited(0, code, 19.0, raised=(18.0, lost))
    assert report_exits([witness, exited(1, -signal.SIGKILL, 20.0)], None, 0).reason == "rank 1 was killed by SIGKILL"


def test_a_watchdog_that_aborts_over_a_lost_peer_is_not_blamed() -> None:
    witness = exited(0, -signal.SIGABRT, 19.0, last_lines=["ncclRemoteError: a call failed possibly due to a peer"])
    assert report_exits([witness, exited(1, 3, 20.0)], None, 0).reason == "rank 1 exited with code 3"
    assert not exited(0, -signal.SIGKILL, last_lines=["broken pipe"]).cascade


@pytest.mark.parametrize(
    ("name", "cause", "why"),
    [
        ("SIGTERM", "preempted", "stopped by SIGTERM"),
        ("SIGINT", "preempted", "stopped by SIGINT"),
        ("SIGUSR1", "timeout", "the time limit is near (SIGUSR1)"),
        ("SIGUSR2", "timeout", "the time limit is near (SIGUSR2)"),
    ],
)
def test_a_signal_asks_for_a_stop_by_what_it_most_likely_means(name: str, cause: str, why: str) -> None:
    request = StopRequest.by_signal(name, at=5.0, node=2)
    assert request == StopRequest(cause=cause, why=why, at=5.0, node=2, signal=name)


def test_a_node_without_ranks_reports_the_signal_that_stopped_it() -> None:
    assert report_signal("SIGTERM", at=5.0) == ExitReport(
        cause="preempted", reason="stopped by SIGTERM", failed_at=5.0, signal="SIGTERM"
    )
    early = report_signal("SIGTERM", at=None, before_start=True, missing=["n1"])
    assert (early.reason, early.evidence) == ("stopped by SIGTERM before it began", {"gone": ["n1"]})


# --- what amends a report -------------------------------------------------------------------------------------------

KILLED = {"rank": 2, "signal": "SIGKILL", "exit_code": None, "error": None, "last_lines": ["step 7"]}
RAISED = {"rank": 0, "signal": None, "exit_code": 1, "error": "ValueError: 1", "last_lines": []}
XID = {"bus": "0000:3b:00", "code": 31, "times": 1}
COMPLETED = ExitReport(cause="completed", reason="")
CRASH = ExitReport(cause="crash", reason="rank 2 was killed by SIGKILL", failed_at=1.0, failures=(KILLED,))
HANG = ExitReport(cause="hang", reason="rank 2 finished no step for 60 s", failed_at=1.0)
SIGNALLED = ExitReport(cause="preempted", reason="stopped by SIGTERM", failed_at=1.0, signal="SIGTERM")
PREFLIGHT = ExitReport(cause="preflight", reason="n1 has no GPU", failed_at=1.0, without=("n1",))
KILLS = KernelEvidence(oom_kills=2, memory_limit=8 * GIB)
SERVED = NodeZeroCompleted(at=3.0, names=["n1"])
NODE_1 = LostNodes(names=["n1"], hosts=["n1"], at=9.0)
PREEMPTED = StopCause(cause="preempted", why="preempted by a job of higher priority", evidence={"state": "RUNNING"})
RUNS_ON = StopCause(cause="preempted", why="?", job_runs_on=True, evidence={"state": "RUNNING"})
MISSING_1 = report_signal("SIGTERM", at=1.0, missing=["n1"])


@pytest.mark.parametrize(
    ("report", "evidence", "changed"),
    [
        (CRASH, KernelEvidence(), {}),
        (COMPLETED, KernelEvidence(), {}),
        (
            CRASH,
            KILLS,
            {
                "cause": "oom",
                "reason": "rank 2 was killed for memory: the job's limit is 8 GiB (raise resources.mem); "
                "rank 2 was killed by SIGKILL",
                "evidence": {"oom_kills": 2, "memory_limit": 8 * GIB},
            },
        ),
        (SIGNALLED, KILLS, {"evidence": {"oom_kills": 2, "memory_limit": 8 * GIB}}),
        (CRASH, KernelEvidence(xids=[XID]), {"evidence": {"xids": [XID]}}),
        (HANG, HangEvidence("rank 1 is stopped by a signal"), {"reason": "rank 1 is stopped by a signal"}),
        (COMPLETED, NODE_1, {}),
        (SIGNALLED, NODE_1, {"evidence": {"gone": ["n1"]}}),
        (
            CRASH,
            NODE_1,
            {
                "cause": "node_fail",
                "reason": "n1 is gone: its agent has not been heard of any more",
                "failures": (),
                "without": ["n1"],
            },
        ),
        (
            ExitReport(cause="node_fail", reason="node 1 has not been heard from for 15 s"),
            LostNodes(names=["n1", "node 2"], hosts=["n1"], at=9.0),
            {
                "reason": "n1, node 2 are gone: their agents have not been heard of any more",
                "failed_at": 9.0,
                "without": ["n1"],
            },
        ),
        (
            SIGNALLED,
            PREEMPTED,
            {
                "reason": "preempted by a job of higher priority",
                "sure": True,
                "evidence": {"slurm": {"state": "RUNNING"}},
            },
        ),
        (SIGNALLED, StopCause(cause="cancelled", why="x"), {"cause": "cancelled", "reason": "x", "sure": True}),
        (SIGNALLED, RUNS_ON, {"reason": "?", "sure": True, "evidence": {"slurm": {"state": "RUNNING"}}}),
        (
            MISSING_1,
            RUNS_ON,
            {
                "cause": "node_fail",
                "reason": "n1 is gone: its agent has not been heard of any more",
                "signal": None,
                "without": ["n1"],
                "evidence": {"gone": ["n1"], "slurm": {"state": "RUNNING"}},
            },
        ),
        (
            MISSING_1,
            PREEMPTED,
            {
                "reason": "preempted by a job of higher priority",
                "sure": True,
                "evidence": {"gone": ["n1"], "slurm": {"state": "RUNNING"}},
            },
        ),
        (
            PREFLIGHT,
            ExclusionProblem("2 nodes are needed"),
            {"reason": "n1 has no GPU; 2 nodes are needed", "without": ()},
        ),
    ],
)
def test_a_report_is_amended_by_what_is_learned_later_and_stays_the_same_otherwise(
    report: ExitReport, evidence: Evidence, changed: dict[str, Any]
) -> None:
    before = asdict(report)
    amended = amend(report, evidence)
    assert asdict(amended) == {**before, **changed}
    assert asdict(report) == before
    assert (amended is report) == (not changed)


def test_new_evidence_joins_what_was_known() -> None:
    report = ExitReport(cause="crash", reason="x", evidence={"slurm": {}})
    assert amend(report, KernelEvidence(xids=[XID])).evidence == {"slurm": {}, "xids": [XID]}


def test_kills_on_a_machine_that_others_use_too_say_nothing_of_this_job() -> None:
    amended = amend(CRASH, KernelEvidence(oom_kills=1, own=False))
    assert (amended.cause, amended.evidence) == ("crash", {"oom_kills": 1, "memory_limit": None})


def test_only_the_failure_that_others_follow_from_tells_of_memory() -> None:
    report = ExitReport(cause="crash", reason="x", failures=(RAISED, KILLED))
    assert amend(report, KILLS).cause == "crash"


@pytest.mark.parametrize(("code", "blamed"), [(79, True), (48, True), (31, False), (13, False)])
def test_errors_of_a_gpu_itself_are_told_from_those_of_programs(code: int, blamed: bool) -> None:
    assert amend(CRASH, KernelEvidence(xids=[{**XID, "code": code}])).gpu_failed is blamed
    assert not CRASH.gpu_failed


@pytest.mark.parametrize(
    ("sure", "state", "expected"), [(True, "COMPLETING", False), (False, "COMPLETING", True), (False, "", False)]
)
def test_slurm_ends_the_job_if_its_record_says_so_without_a_certain_reason(
    sure: bool, state: str, expected: bool
) -> None:
    report = amend(SIGNALLED, StopCause(cause="preempted", why="x", sure=sure, evidence={"state": state}))
    assert report.slurm_ends_it is expected
    assert not amend(CRASH, StopCause(cause="crash", why="x", sure=False, evidence={"state": "x"})).slurm_ends_it


# --- the report of the attempt --------------------------------------------------------------------------------------


def test_the_attempt_ends_by_the_earliest_failure_that_does_not_follow_from_another() -> None:
    cascade = ExitReport(cause="crash", reason="a", failed_at=0.5, cascade=True)
    assert report_attempt([COMPLETED, SIGNALLED, cascade, CRASH]) is CRASH
    assert report_attempt([COMPLETED, SIGNALLED]) is SIGNALLED
    assert report_attempt([COMPLETED, COMPLETED]) is COMPLETED


def test_ranks_that_hang_are_named_even_where_nodes_were_lost_meanwhile() -> None:
    hang = HangEvidence("rank 1 is stopped by a signal")
    assert report_attempt([HANG], hang, NODE_1).reason == hang.reason
    assert report_attempt([HANG], None, NODE_1).cause == "node_fail"
    assert report_attempt([CRASH], hang) is CRASH


def test_no_blame_lies_with_a_spare_node() -> None:
    assert report_standby(COMPLETED) == COMPLETED
    standby = report_standby(CRASH)
    assert (standby.cause, standby.cascade, standby.failed_at) == ("crash", True, None)


# --- memory ---------------------------------------------------------------------------------------------------------


def failure(error: str | None = None, last_lines: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"rank": 0, "signal": None, "error": error, "last_lines": last_lines, **more}


def test_a_rank_that_was_killed_while_the_kernel_killed_for_memory_had_too_little() -> None:
    killed = failure(signal="SIGKILL", rank=3)
    reason = oom_reason(killed, KernelEvidence(oom_kills=1, memory_limit=62 * GIB))
    assert reason == "rank 3 was killed for memory: the job's limit is 62 GiB (raise resources.mem)"
    assert "the node had none left" in (oom_reason(killed, KernelEvidence(oom_kills=1)) or "")


def test_a_rank_whose_data_loader_was_killed_for_memory_had_too_little() -> None:
    raised = failure("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ")
    assert oom_reason(raised, KernelEvidence(oom_kills=1, memory_limit=GIB)) == (
        "a data loader's process of rank 0 was killed for memory: the job's limit is 1 GiB (raise resources.mem)"
    )
    assert oom_reason(raised, KernelEvidence(memory_limit=GIB)) is None


@pytest.mark.parametrize(("name", "kills"), [("SIGKILL", 0), ("SIGSEGV", 1), (None, 1), (None, 0)])
def test_other_ends_are_not_for_lack_of_memory(name: str | None, kills: int) -> None:
    kernel = KernelEvidence(oom_kills=kills, memory_limit=GIB)
    assert oom_reason(failure("ValueError: out of range", signal=name), kernel) is None
    assert oom_reason(failure(signal=name), kernel) is None


@pytest.mark.parametrize(
    ("error", "short"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU memory"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", "GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "GPU memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "GPU memory"),
        ("MemoryError", "resources.mem"),
        ("OSError: [Errno 12] Cannot allocate memory", "resources.mem"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
            "resources.mem",
        ),
    ],
)
def test_what_an_exception_says_of_memory_tells_which_was_short(error: str, short: str) -> None:
    assert short in (oom_reason(failure(error), KernelEvidence()) or "")
    assert short in (oom_reason(failure(last_lines=(error, "bye")), KernelEvidence()) or "")


def test_the_end_of_node_0_long_before_explains_a_time_limit_and_nothing_else() -> None:
    limit = ExitReport(cause="timeout", reason="the time limit was reached", failed_at=9.0)
    amended = amend(limit, SERVED)
    assert amended.reason == "the time limit was reached; the command of node 0 had completed, and n1 still ran"
    # Sorts before the reports of the other nodes.
    assert amended.blame < limit.blame
    assert amended.evidence == {NODE_0_COMPLETED: 3.0}
    for cause in ("completed", "crash", "preempted"):
        other = ExitReport(cause=cause, reason="")
        assert amend(other, SERVED) == other
