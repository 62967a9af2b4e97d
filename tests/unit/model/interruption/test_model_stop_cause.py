"""What a signal stands for. The records are those that Slurm 22.05.8 gave to a task that had just got the signal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.stop_cause import Cause, JobView, budget, cause_of_stop, read_view, time_left
from slurmtrain.model.run.run import CAUSES
from slurmtrain.slurm.parse import read_job

PREEMPTED = """
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:01:14 TimeLimit=00:10:00 TimeMin=N/A
   StartTime=1795293941 EndTime=1795294034 Deadline=N/A
   PreemptEligibleTime=1795293941 PreemptTime=1795294014
"""
REQUEUED = """
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=N/A
   StartTime=1795294039 EndTime=1795294639 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0
"""
CANCELLED = """
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15
   RunTime=00:00:05 TimeLimit=00:10:00 TimeMin=N/A
   StartTime=1795293926 EndTime=1795293931 Deadline=N/A
   PreemptEligibleTime=1795293926 PreemptTime=None
"""
# A person cancelled it 8 s after its limit, before Slurm had ended it.
CANCELLED_LATE = """
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15
   RunTime=00:01:08 TimeLimit=00:01:00 TimeMin=N/A
   StartTime=1795293819 EndTime=1795293887 Deadline=N/A
   PreemptEligibleTime=1795293819 PreemptTime=None
"""
NEAR_LIMIT = """
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:10 TimeLimit=00:01:00 TimeMin=N/A
   StartTime=1795293819 EndTime=1795293879 Deadline=N/A
   PreemptEligibleTime=1795293819 PreemptTime=None
"""
AT_LIMIT = """
   JobState=COMPLETING Reason=TimeLimit Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15
   RunTime=00:01:10 TimeLimit=00:01:00 TimeMin=N/A
   StartTime=1795293819 EndTime=1795293889 Deadline=N/A
   PreemptEligibleTime=1795293819 PreemptTime=None
"""
# scancel --signal=TERM
SIGNALLED = """
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:05 TimeLimit=00:10:00 TimeMin=N/A
   StartTime=1795293926 EndTime=1795294526 Deadline=N/A
   PreemptEligibleTime=1795293926 PreemptTime=None
"""

NOW = 1795294000.0
RUNNING = JobView(state="RUNNING", start_time=NOW - 100, end_time=NOW + 500, time_limit_s=600.0)


def seen(record: str) -> JobView:
    """The view of one of the records above."""
    return read_view(read_job(record))


def cause(signal: str, view: JobView | None, now: float = NOW, **said: Any) -> Cause:
    """Why a job of Slurm's was asked to stop."""
    return cause_of_stop(signal, view, now=now, **{"executor": "slurm", "deadline": False, **said})


# --- causes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signal", "record", "now", "expected", "sure"),
    [
        ("SIGTERM", PREEMPTED, 1795294015.0, "preempted", True),
        ("SIGUSR2", PREEMPTED, 1795294015.0, "preempted", True),
        ("SIGTERM", REQUEUED, 1795294039.7, "preempted", False),
        ("SIGTERM", CANCELLED, 1795293931.3, "cancelled", True),
        ("SIGTERM", CANCELLED_LATE, 1795293887.6, "cancelled", True),
        ("SIGUSR2", NEAR_LIMIT, 1795293829.3, "timeout", True),
        ("SIGUSR1", NEAR_LIMIT, 1795293829.3, "timeout", True),
        ("SIGTERM", AT_LIMIT, 1795293889.4, "timeout", True),
        ("SIGTERM", SIGNALLED, 1795293931.3, "preempted", True),
    ],
)
def test_what_slurm_says_of_a_job_tells_what_a_signal_was_for(
    signal: str, record: str, now: float, expected: str, sure: bool
) -> None:
    found = cause(signal, seen(record), now)
    assert (found.cause, found.sure) == (expected, sure)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED", "cancelled"), ("NODE_FAIL", "node_fail"), ("BOOT_FAIL", "node_fail"), ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"), ("OUT_OF_MEMORY", "oom"), ("PREEMPTED", "preempted"), ("PENDING", "preempted"),
        ("REQUEUED", "preempted"), ("RUNNING", "preempted"),
    ],
)  # fmt: skip
def test_a_state_that_says_it_all_decides(state: str, expected: str) -> None:
    assert cause("SIGTERM", replace(RUNNING, state=state)).cause == expected


@pytest.mark.parametrize(
    ("reason", "expected"), [("NodeDown", "node_fail"), ("OutOfMemory", "oom"), ("DeadLine", "timeout")]
)
def test_the_reason_of_a_job_that_slurm_ends_decides(reason: str, expected: str) -> None:
    assert cause("SIGTERM", replace(RUNNING, state="COMPLETING", reason=reason, end_time=NOW)).cause == expected


def test_a_job_whose_script_has_ended_was_not_cancelled() -> None:
    view = replace(RUNNING, state="COMPLETING", reason="NonZeroExitCode", end_time=NOW)
    assert cause("SIGTERM", view).cause == "preempted"


def test_a_cancel_outranks_a_preemption_and_a_time_limit() -> None:
    view = replace(RUNNING, state="CANCELLED", preempt_time=NOW, end_time=NOW, time_limit_s=100.0)
    assert cause("SIGUSR2", view, deadline=True).cause == "cancelled"


@pytest.mark.parametrize(
    ("at", "expected"), [(NOW - 20, True), (NOW + 30, True), (NOW - 200, False), (NOW + 99, False)]
)
def test_a_preemption_of_an_earlier_start_or_of_later_is_none_of_this(at: float, expected: bool) -> None:
    found = cause("SIGUSR2", replace(RUNNING, preempt_time=at))
    assert found.cause == ("preempted" if expected else "timeout")


def test_a_running_job_at_its_limit_timed_out_though_slurm_does_not_say_so_yet() -> None:
    at_limit = replace(RUNNING, end_time=NOW + 1, time_limit_s=101.0)
    assert cause("SIGTERM", at_limit).cause == "timeout"
    assert cause("SIGTERM", replace(at_limit, time_limit_s=300.0)).cause == "preempted"
    assert cause("SIGTERM", replace(at_limit, end_time=NOW + 400, time_limit_s=500.0)).cause == "preempted"


def test_without_an_answer_of_slurms_nothing_is_certain() -> None:
    found = cause("SIGTERM", None)
    assert (found.cause, found.sure) == ("preempted", False)
    assert "Slurm does not say" in found.why
    found = cause("SIGUSR2", None)
    assert (found.cause, found.sure) == ("timeout", False)


def test_a_time_limit_that_the_agent_keeps_itself_needs_no_signal() -> None:
    assert cause("", None, executor="local", deadline=True).cause == "timeout"
    assert cause("SIGTERM", RUNNING, deadline=True).cause == "timeout"
    assert cause("SIGTERM", seen(PREEMPTED), 1795294015.0, deadline=True).cause == "preempted"


@pytest.mark.parametrize(
    ("signal", "expected"),
    [("SIGINT", "cancelled"), ("SIGTERM", "preempted"), ("SIGHUP", "preempted"), ("SIGUSR2", "timeout")],
)
def test_without_slurm_the_signal_itself_decides(signal: str, expected: str) -> None:
    found = cause(signal, None, executor="local")
    assert (found.cause, found.sure) == (expected, True)
    assert signal in found.why


def test_evidence_says_what_a_cause_was_concluded_from() -> None:
    evidence = cause("SIGTERM", seen(PREEMPTED), 1795294015.0).evidence
    assert evidence["signal"] == "SIGTERM"
    assert (evidence["state"], evidence["preempt_time"], evidence["end_time"]) == ("RUNNING", 1795294014, 1795294034)
    assert evidence["time_left_s"] == 19
    assert json.loads(json.dumps(evidence)) == evidence


TIMES = st.none() | st.floats(NOW - 1e6, NOW + 1e6)


@given(
    st.sampled_from(["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", ""]),
    st.none()
    | st.builds(
        JobView,
        state=st.sampled_from(["", "RUNNING", "COMPLETING", "PENDING", "CANCELLED", "FAILED", "COMPLETED", "NEW_WORD"]),
        preempt_time=TIMES, end_time=TIMES, start_time=TIMES, time_limit_s=st.none() | st.floats(0, 1e6),
        reason=st.sampled_from(["", "TimeLimit", "NodeDown", "NonZeroExitCode", "Resources"]),
    ),
    st.sampled_from(["slurm", "local"]),
    st.booleans(),
)  # fmt: skip
def test_whatever_is_seen_has_a_cause_that_is_known(
    signal: str, view: JobView | None, executor: str, deadline: bool
) -> None:
    found = cause(signal, view, executor=executor, deadline=deadline)
    assert found.cause in CAUSES
    assert found.why
    left = time_left(view, NOW)
    assert left is None or left >= 0


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_record_is_read() -> None:
    assert seen(PREEMPTED) == JobView(
        state="RUNNING",
        preempt_time=1795294014.0,
        end_time=1795294034.0,
        start_time=1795293941.0,
        time_limit_s=600.0,
        requeue=True,
        restarts=0,
    )
    assert seen(AT_LIMIT).reason == "TimeLimit"


def test_times_may_be_written_as_local_time() -> None:
    view = read_view({"StartTime": "2026-11-21T20:36:34", "TimeLimit": "2-03:04:05"})
    assert view.start_time == time.mktime((2026, 11, 21, 20, 36, 34, 0, 0, -1))
    assert view.time_limit_s == ((2 * 24 + 3) * 60 + 4) * 60 + 5


@pytest.mark.parametrize(
    "word", ["None", "Unknown", "UNLIMITED", "N/A", "", "0", "inf", "nan", "-1", "Partition_Limit"]
)
def test_words_are_no_times(word: str) -> None:
    view = read_view({"StartTime": word, "EndTime": word, "PreemptTime": word, "TimeLimit": word, "Requeue": word})
    assert (view.start_time, view.end_time, view.preempt_time, view.time_limit_s) == (None,) * 4


def test_a_state_is_read_without_what_slurm_appends() -> None:
    assert read_view({"JobState": "CANCELLED+", "Requeue": "0", "Reason": "None"}) == JobView(
        state="CANCELLED", requeue=False
    )


@given(st.dictionaries(st.sampled_from(["JobState", "StartTime", "TimeLimit", "Restarts", "Reason"]), st.text()))
def test_any_record_can_be_read(fields: dict[str, str]) -> None:
    assert isinstance(read_view(fields), JobView)


# --- how long ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_preemptions_grace_is_what_is_left() -> None:
    assert time_left(seen(PREEMPTED), 1795294015.0) == 19
    assert time_left(seen(NEAR_LIMIT), 1795293829.0) == 50
    assert time_left(RUNNING, NOW + 1000) == 0


def test_of_a_job_that_leaves_or_that_nobody_knows_it_is_not_known_what_is_left() -> None:
    assert time_left(seen(REQUEUED), 1795294039.7) is None
    assert time_left(seen(CANCELLED), 1795293931.3) is None
    assert time_left(replace(RUNNING, end_time=None), NOW) is None
    assert time_left(None, NOW) is None


@pytest.mark.parametrize(
    ("left_s", "grace_s", "expected"),
    [(19.0, 100.0, 15.0), (None, 100.0, 96.0), (None, None, 26.0), (3.0, None, 1.0), (0.0, 100.0, 1.0)],
)
def test_ranks_may_take_what_is_left_but_for_what_putting_back_takes(
    left_s: float | None, grace_s: float | None, expected: float
) -> None:
    assert budget(left_s, grace_s) == expected


def test_what_putting_back_takes_may_be_told() -> None:
    assert budget(20.0, None, put_back_s=8.0) == 12.0
