"""Why the ranks of a node ended, and what amends the report of it."""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from typing import Any

import pytest

from slurmtrain.model.interruption.exit_report import (
    NODE_0_COMPLETED,
    STOPPED,
    Evidence,
    Exit,
    ExitReport,
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


STOP = StopRequest(cause="preempted", why="SIGUSR2", at=50.0, node=0)


def test_the_first_worker_to_fail_is_the_cause_and_all_failures_are_listed() -> None:
    exits = [exited(0, -signal.SIGTERM, 102.0), exited(1, 3, 101.0, last_lines=["a", "ValueError: no", " "])]
    report = report_exits(exits, None, 0)
    assert (report.cause, report.failed_at) == ("crash", 101.0)
    assert report.reason == "ValueError: no; rank 1 exited with code 3"
    assert [(failure["rank"], failure["signal"], failure["exit_code"]) for failure in report.failures] == [
        (1, None, 3), (0, "SIGTERM", None),
    ]  # fmt: skip
    assert exits[0].describe() == "rank 0 was killed by SIGTERM"
    assert exited(0, -100).describe() == "rank 0 was killed by signal 100"
    assert exited(0, 139).describe() == "rank 0 exited with code 139 (SIGSEGV)"
    assert exited(0, -11, place="train.py:3").describe() == "rank 0 was killed by SIGSEGV (train.py:3)"


def test_a_reason_begins_with_the_error_and_the_line_that_raised_it() -> None:
    title = (
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for weight\n\tsize mismatch for bias"
    )
    described = exited(2, 1, raised=(1.0, title), place="src/net.py:31", limit="no file descriptors left").describe()
    assert described == (
        "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for weight (src/net.py:31); "
        "rank 2 exited with code 1; no file descriptors left"
    )


def test_the_time_of_an_exception_counts_not_that_of_the_exit() -> None:
    early = exited(1, 1, 110.0, raised=(100.5, "RuntimeError: boom"), last_lines=["something else"])
    report = report_exits([exited(0, 1, 101.0), early], None, 0)
    assert report.reason == "RuntimeError: boom; rank 1 exited with code 1"
    assert report.failed_at == 100.5


WORK_IS_DONE = {"finished": True}


@pytest.mark.parametrize(
    ("exits", "stop", "expected"),
    [
        ([(0, 100.0, {}), (0, 100.0, {})], None, "completed"),
        ([(STOPPED, 100.0, {}), (0, 100.0, {})], None, "cancelled"),
        # A rank that finished its work and then failed has not completed.
        ([(3, 100.0, WORK_IS_DONE)], None, "crash"),
        # After a request, exit codes follow from it, and 0 proves nothing unless all say that their work is done.
        ([(STOPPED, 100.0, {}), (STOPPED, 100.0, {})], STOP, "preempted"),
        ([(STOPPED, 100.0, {}), (0, 100.0, {})], STOP, "preempted"),
        ([(1, 100.0, {}), (STOPPED, 100.0, {})], STOP, "preempted"),
        ([(-signal.SIGKILL, 100.0, {}), (3, 100.0, {})], STOP, "preempted"),
        ([(0, 100.0, {}), (0, 100.0, {})], STOP, "preempted"),
        ([(0, 100.0, WORK_IS_DONE), (0, 100.0, {})], STOP, "preempted"),
        ([(0, 100.0, WORK_IS_DONE), (0, 100.0, WORK_IS_DONE)], STOP, "completed"),
        ([(STOPPED, 100.0, WORK_IS_DONE)], STOP, "preempted"),
        # Well before it 0 is completion; the same signal may reach a rank a moment before.
        ([(0, 48.9, {}), (0, 100.0, WORK_IS_DONE)], STOP, "completed"),
        ([(0, 49.9, {}), (0, 100.0, WORK_IS_DONE)], STOP, "preempted"),
        ([(0, 50.1, {}), (0, 100.0, WORK_IS_DONE)], STOP, "preempted"),
        ([(1, 49.0, {}), (STOPPED, 60.0, {})], STOP, "crash"),
        *(([(-signum, 49.9, {})], STOP, "preempted")
          for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)),
    ],
)  # fmt: skip
def test_why_the_ranks_of_a_node_ended(
    exits: list[tuple[int, float, dict[str, Any]]], stop: StopRequest | None, expected: str
) -> None:
    ended = [exited(rank, code, at, **more) for rank, (code, at, more) in enumerate(exits)]
    report = report_exits(ended, stop, 0)
    assert report.cause == expected
    if expected == "preempted":
        assert report == ExitReport(cause="preempted", reason="SIGUSR2", failed_at=50.0)
        # Only the node with the reason has a time of failure.
        assert report_exits(ended, stop, 1) == replace(report, failed_at=None)
        by_zero = report_exits(ended, stop, 0, zero_completes=True).cause
        assert by_zero == ("completed" if {code for code, _, _ in exits} == {0} else "preempted")
    elif expected == "crash":
        assert report.failed_at == min(at for code, at, _ in exits if code not in (0, STOPPED))
    else:
        assert report.failed_at is None


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker hanging"


@pytest.mark.parametrize(
    "witness",
    [
        exited(0, 1, 19.0, raised=(18.0, LOST)),
        exited(0, -signal.SIGTERM, 19.0, raised=(18.0, LOST)),
        exited(0, -signal.SIGABRT, 19.0, raised=(18.0, LOST)),
        exited(0, 1, 18.5, last_lines=[LOST]),
        # A watchdog aborts.
        exited(0, -signal.SIGABRT, 19.0, last_lines=["ncclRemoteError: a call failed possibly due to a peer"]),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_blamed_even_if_it_was_noticed_first(witness: Exit) -> None:
    report = report_exits([witness, exited(1, -signal.SIGKILL, 20.0)], None, 0)
    assert report.reason == "rank 1 was killed by SIGKILL"
    assert not report.cascade
    assert report_exits([witness], None, 0).cascade
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
HANG = ExitReport(cause="hang", reason="rank 2 did not finish a step for 60 s", failed_at=1.0)
SIGNALLED = ExitReport(cause="preempted", reason="stopped by SIGTERM", failed_at=1.0, signal="SIGTERM")
KILLS = KernelEvidence(oom_kills=2, memory_limit=8 * GIB)
SERVED = NodeZeroCompleted(at=3.0, names=["n1"])
NODE_1 = LostNodes(names=["n1"], hosts=["n1"], at=9.0)
PREEMPTED = StopCause(cause="preempted", why="preempted by a job of higher priority", evidence={"state": "RUNNING"})
RUNS_ON = StopCause(cause="preempted", why="?", job_runs_on=True, evidence={"state": "RUNNING"})
MISSING_1 = report_signal("SIGTERM", at=1.0, missing=["n1"])
RAISED_FIRST = ExitReport(cause="crash", reason="x", failures=(RAISED, KILLED))


OOM_KILLS = {"oom_kills": 2, "memory_limit": 8 * GIB}
IN_SLURM = {"slurm": {"state": "RUNNING"}}
N1_IS_GONE = "n1 is gone: its agent no longer responds"
XIDS = {"xids": [XID]}
BY_ANOTHER = "preempted by a job of higher priority"


@pytest.mark.parametrize(
    ("report", "evidence", "changed"),
    [
        (CRASH, KernelEvidence(), {}),
        (COMPLETED, KernelEvidence(), {}),
        (CRASH, KILLS, {"cause": "oom", "evidence": OOM_KILLS,
                        "reason": "rank 2 was killed for memory: its limit is 8 GiB; "
                                  "rank 2 was killed by SIGKILL"}),
        (CRASH, KernelEvidence(oom_kills=1),
         {"cause": "oom", "evidence": {"oom_kills": 1, "memory_limit": None},
          "reason": "rank 2 was killed for memory: the node had no memory left; rank 2 was killed by SIGKILL"}),
        # Only the failure that others follow from tells of memory.
        (RAISED_FIRST, KILLS, {"evidence": OOM_KILLS}),
        (SIGNALLED, KILLS, {"evidence": OOM_KILLS}),
        (CRASH, KernelEvidence(xids=[XID]), {"evidence": XIDS}),
        (replace(CRASH, evidence={"slurm": {}}), KernelEvidence(xids=[XID]), {"evidence": {"slurm": {}, **XIDS}}),
        (COMPLETED, NODE_1, {}),
        (SIGNALLED, NODE_1, {"evidence": {"gone": ["n1"]}}),
        (CRASH, NODE_1, {"cause": "node_fail", "reason": N1_IS_GONE, "failures": (), "without": ["n1"]}),
        (ExitReport(cause="node_fail", reason="node 1 has not sent a heartbeat for 15 s"),
         LostNodes(names=["n1", "node 2"], hosts=["n1"], at=9.0),
         {"reason": "n1, node 2 are gone: their agents no longer respond", "failed_at": 9.0,
          "without": ["n1"]}),
        (SIGNALLED, PREEMPTED, {"reason": BY_ANOTHER, "sure": True, "evidence": IN_SLURM}),
        (SIGNALLED, StopCause(cause="cancelled", why="x"), {"cause": "cancelled", "reason": "x", "sure": True}),
        (SIGNALLED, RUNS_ON, {"reason": "?", "sure": True, "evidence": IN_SLURM}),
        (MISSING_1, RUNS_ON, {"cause": "node_fail", "reason": N1_IS_GONE, "signal": None, "without": ["n1"],
                              "evidence": {"gone": ["n1"], **IN_SLURM}}),
        (MISSING_1, PREEMPTED, {"reason": BY_ANOTHER, "sure": True, "evidence": {"gone": ["n1"], **IN_SLURM}}),
    ],
)  # fmt: skip
def test_a_report_is_amended_by_what_is_learned_later_and_stays_the_same_otherwise(
    report: ExitReport, evidence: Evidence, changed: dict[str, Any]
) -> None:
    before = asdict(report)
    amended = amend(report, evidence)
    assert asdict(amended) == {**before, **changed}
    assert asdict(report) == before
    assert (amended is report) == (not changed)


def test_a_further_reason_is_added_unless_the_ranks_completed() -> None:
    assert CRASH.adding("2 nodes are needed").reason == "rank 2 was killed by SIGKILL; 2 nodes are needed"
    assert (CRASH.adding(""), COMPLETED.adding("the directory is gone")) == (CRASH, COMPLETED)


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
    hang = "rank 1 is stopped by a signal"
    assert report_attempt([HANG], hang, NODE_1).reason == hang
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
    assert reason == "rank 3 was killed for memory: its limit is 62 GiB"
    assert "the node had no memory left" in (oom_reason(killed, KernelEvidence(oom_kills=1)) or "")


@pytest.mark.parametrize(
    "child",
    [
        failure("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "),
        failure("RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly", exit_code=1),
        failure(
            last_lines=("bash: line 1:  7263 Killed                  python train.py", "cleaning up", "a", "b", "c")
        ),
        failure("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>."),
        failure(exit_code=137),
    ],
)
def test_a_rank_whose_child_was_killed_for_memory_had_too_little(child: dict[str, Any]) -> None:
    assert oom_reason(child, KernelEvidence(oom_kills=1, memory_limit=GIB)) == (
        "a process of rank 0 was killed for memory: its limit is 1 GiB"
    )
    assert oom_reason(child, KernelEvidence(memory_limit=GIB)) is None
    # Where the kernel counts for the whole machine only, no limit is known.
    assert "the node had no memory left" in (oom_reason(child, KernelEvidence(oom_kills=1)) or "")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU memory"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", "GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "GPU memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "GPU memory"),
        ("MemoryError", "no more memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "no more memory"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
            "no more memory",
        ),
    ],
)
def test_what_an_exception_says_of_memory_tells_which_was_short(error: str, short: str) -> None:
    assert short in (oom_reason(failure(error), KernelEvidence()) or "")
    assert short in (oom_reason(failure(last_lines=(error, "bye")), KernelEvidence()) or "")


def test_the_end_of_node_0_long_before_explains_a_time_limit_and_nothing_else() -> None:
    limit = ExitReport(cause="timeout", reason="the time limit was reached", failed_at=9.0)
    amended = amend(limit, SERVED)
    assert amended.reason == "the time limit was reached; the command of node 0 had completed, but n1 still ran"
    # Sorts before the reports of the other nodes.
    assert amended.blame < limit.blame
    assert amended.evidence == {NODE_0_COMPLETED: 3.0}
    for cause in ("completed", "crash", "preempted"):
        other = ExitReport(cause=cause, reason="")
        assert amend(other, SERVED) == other
