"""Asking Slurm, once, what a signal stands for and how long there is, while ranks are stopping already.

The records are those that Slurm 22.05.8 gave to a task that had just got the signal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from helpers.site import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import SlurmDown
from slurmtrain.model.interruption.exit_report import StopCause
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.run import CAUSES
from slurmtrain.runtime.agent import job_query
from slurmtrain.runtime.agent.job_query import (
    PUT_BACK_S,
    JobQuery,
    JobView,
    budget,
    cause_of_stop,
    read_view,
    time_left,
)
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


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers at all has time to, on a busy machine too."""
    monkeypatch.setattr(job_query, "PATIENCE_S", PATIENCE_S)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Both clocks of the machine, which stand still."""
    clock = {"wall": 5_000.0, "monotonic": 100.0}
    monkeypatch.setattr(job_query.time, "time", lambda: clock["wall"])
    monkeypatch.setattr(job_query.time, "monotonic", lambda: clock["monotonic"])
    return clock


class Slurm:
    """Answers a question, as often as it is asked."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields
        self.questions = 0

    def __call__(self) -> Mapping[str, str]:
        self.questions += 1
        return self.fields


def test_slurm_is_asked_once_however_often_the_answer_is_read() -> None:
    slurm = Slurm(JobState="RUNNING", Restarts="2")
    query = JobQuery(slurm, None)
    query.begin()
    query.begin()
    for _ in range(2):
        view = query.view()
        assert view is not None
        assert (view.state, view.restarts) == ("RUNNING", 2)
    query.stop_by()
    assert slurm.questions == 1


@pytest.mark.parametrize("began", [100.0, 0.5])
@pytest.mark.parametrize(("grace_s", "left_s"), [(None, DEFAULT_GRACE_S), (120.0, 120.0), (2.0, PUT_BACK_S + 1.0)])
def test_without_a_scheduler_ranks_have_the_grace_of_the_site_from_the_first_question_on(
    now: dict[str, float], began: float, grace_s: float | None, left_s: float
) -> None:
    now["monotonic"] = began
    query = JobQuery(None, grace_s)
    assert query.view() is None
    query.begin()
    now["monotonic"] += 20.0
    assert query.stop_by() == began + left_s - PUT_BACK_S


def test_ranks_have_the_grace_that_slurm_tells_however_late_it_answers(now: dict[str, float]) -> None:
    answer = threading.Event()

    def slow() -> Mapping[str, str]:
        answer.wait()
        return {"JobState": "RUNNING", "EndTime": "5090", "PreemptTime": "5000"}

    query = JobQuery(slow, 30.0)
    query.begin()
    assert query.stop_by() == 100.0 + 30.0 - PUT_BACK_S
    now["wall"] += 3.0
    now["monotonic"] += 3.0
    answer.set()
    assert query.view() is not None
    assert query.stop_by() == 100.0 + 90.0 - PUT_BACK_S


def test_there_is_no_answer_where_slurm_is_down_or_does_not_answer_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def down() -> Mapping[str, str]:
        raise SlurmDown("down")

    def never() -> Mapping[str, str]:
        over.wait()
        return {}

    assert JobQuery(down, None).view() is None
    monkeypatch.setattr(job_query, "PATIENCE_S", 0.01)
    assert JobQuery(never, None).view() is None
    over.set()


def view_of(record: str) -> JobView:
    """The view of one of the records above."""
    return read_view(read_job(record))


def cause(signal: str, view: JobView | None, now: float = NOW, **more: Any) -> StopCause:
    """Why a job of Slurm's was asked to stop."""
    return cause_of_stop(signal, view, now=now, **{"executor": "slurm", "deadline": False, **more})


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
def test_the_record_of_a_job_tells_what_a_signal_was_for(
    signal: str, record: str, now: float, expected: str, sure: bool
) -> None:
    stop = cause(signal, view_of(record), now)
    assert (stop.cause, stop.sure) == (expected, sure)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED", "cancelled"), ("NODE_FAIL", "node_fail"), ("BOOT_FAIL", "node_fail"), ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"), ("OUT_OF_MEMORY", "oom"), ("PREEMPTED", "preempted"), ("PENDING", "preempted"),
        ("REQUEUED", "preempted"), ("RUNNING", "preempted"),
    ],
)  # fmt: skip
def test_an_unambiguous_state_decides(state: str, expected: str) -> None:
    assert cause("SIGTERM", replace(RUNNING, state=state)).cause == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("NodeDown", "node_fail"), ("OutOfMemory", "oom"), ("DeadLine", "timeout"), ("NonZeroExitCode", "preempted")],
)
def test_the_reason_of_a_job_that_slurm_ends_decides(reason: str, expected: str) -> None:
    assert cause("SIGTERM", replace(RUNNING, state="COMPLETING", reason=reason, end_time=NOW)).cause == expected


def test_a_cancel_outranks_a_preemption_and_a_time_limit() -> None:
    view = replace(RUNNING, state="CANCELLED", preempt_time=NOW, end_time=NOW, time_limit_s=100.0)
    assert cause("SIGUSR2", view, deadline=True).cause == "cancelled"


@pytest.mark.parametrize(
    ("at", "expected"), [(NOW - 20, True), (NOW + 30, True), (NOW - 200, False), (NOW + 99, False)]
)
def test_a_preemption_of_an_earlier_or_later_start_does_not_count(at: float, expected: bool) -> None:
    stop = cause("SIGUSR2", replace(RUNNING, preempt_time=at))
    assert stop.cause == ("preempted" if expected else "timeout")


def test_a_running_job_at_its_limit_timed_out_though_slurm_does_not_say_so_yet() -> None:
    at_limit = replace(RUNNING, end_time=NOW + 1, time_limit_s=101.0)
    assert cause("SIGTERM", at_limit).cause == "timeout"
    assert cause("SIGTERM", replace(at_limit, time_limit_s=300.0)).cause == "preempted"
    assert cause("SIGTERM", replace(at_limit, end_time=NOW + 400, time_limit_s=500.0)).cause == "preempted"


def test_without_an_answer_from_slurm_nothing_is_certain() -> None:
    stop = cause("SIGTERM", None)
    assert (stop.cause, stop.sure) == ("preempted", False)
    assert "Slurm does not say" in stop.why
    stop = cause("SIGUSR2", None)
    assert (stop.cause, stop.sure) == ("timeout", False)


def test_a_time_limit_that_the_agent_keeps_itself_needs_no_signal() -> None:
    assert cause("", None, executor="local", deadline=True).cause == "timeout"
    assert cause("SIGTERM", RUNNING, deadline=True).cause == "timeout"
    assert cause("SIGTERM", view_of(PREEMPTED), 1795294015.0, deadline=True).cause == "preempted"


@pytest.mark.parametrize(
    ("signal", "expected"),
    [("SIGINT", "cancelled"), ("SIGTERM", "preempted"), ("SIGHUP", "preempted"), ("SIGUSR2", "timeout")],
)
def test_without_slurm_the_signal_itself_decides(signal: str, expected: str) -> None:
    stop = cause(signal, None, executor="local")
    assert (stop.cause, stop.sure) == (expected, True)
    assert signal in stop.why


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
def test_every_combination_has_a_known_cause(signal: str, view: JobView | None, executor: str, deadline: bool) -> None:
    stop = cause(signal, view, executor=executor, deadline=deadline)
    assert stop.cause in CAUSES
    assert stop.why
    left = time_left(view, NOW)
    assert left is None or left >= 0


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_record_is_read() -> None:
    assert view_of(PREEMPTED) == JobView(
        state="RUNNING",
        preempt_time=1795294014.0,
        end_time=1795294034.0,
        start_time=1795293941.0,
        time_limit_s=600.0,
        requeue=True,
        restarts=0,
    )
    assert view_of(AT_LIMIT).reason == "TimeLimit"
    # With a suffix, and with local times.
    suffixed = {"JobState": "CANCELLED+", "Requeue": "0", "Reason": "None"}
    assert read_view(suffixed) == JobView(state="CANCELLED", requeue=False)
    view = read_view({"StartTime": "2026-11-21T20:36:34", "TimeLimit": "2-03:04:05"})
    assert view.start_time == time.mktime((2026, 11, 21, 20, 36, 34, 0, 0, -1))
    assert view.time_limit_s == ((2 * 24 + 3) * 60 + 4) * 60 + 5


@pytest.mark.parametrize(
    "word", ["None", "Unknown", "UNLIMITED", "N/A", "", "0", "inf", "nan", "-1", "Partition_Limit"]
)
def test_words_and_zero_are_not_taken_for_times(word: str) -> None:
    view = read_view({"StartTime": word, "EndTime": word, "PreemptTime": word, "TimeLimit": word, "Requeue": word})
    assert (view.start_time, view.end_time, view.preempt_time, view.time_limit_s) == (None,) * 4


@given(st.dictionaries(st.sampled_from(["JobState", "StartTime", "TimeLimit", "Restarts", "Reason"]), st.text()))
def test_any_record_can_be_read(fields: dict[str, str]) -> None:
    assert isinstance(read_view(fields), JobView)


# --- how long ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "now", "left_s"),
    [
        (view_of(PREEMPTED), 1795294015.0, 19),
        (view_of(NEAR_LIMIT), 1795293829.0, 50),
        (RUNNING, NOW + 1000, 0),
        # Unknown for a job that is ending.
        (view_of(REQUEUED), 1795294039.7, None),
        (view_of(CANCELLED), 1795293931.3, None),
        (replace(RUNNING, end_time=None), NOW, None),
        (None, NOW, None),
    ],
)
def test_the_time_left_is_that_until_slurm_ends_the_job(view: JobView | None, now: float, left_s: float | None) -> None:
    assert time_left(view, now) == left_s


@pytest.mark.parametrize(
    ("left_s", "grace_s", "expected"),
    [(19.0, 100.0, 15.0), (None, 100.0, 96.0), (None, None, 26.0), (3.0, None, 1.0), (0.0, 100.0, 1.0)],
)
def test_ranks_may_take_the_time_left_less_that_of_a_requeue(
    left_s: float | None, grace_s: float | None, expected: float
) -> None:
    assert budget(left_s, grace_s) == expected
