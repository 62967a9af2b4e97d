"""Asking Slurm, once, what a signal stands for and how long there is, while ranks are stopping already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest
from helpers.site import PATIENCE_S

from slurmtrain.errors import SlurmDown
from slurmtrain.model.interruption.stop_cause import DEFAULT_GRACE_S, PUT_BACK_S
from slurmtrain.runtime.agent import job_query
from slurmtrain.runtime.agent.job_query import JobQuery

Ask = Callable[[], Mapping[str, str]]


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
        self.asked = 0

    def __call__(self) -> Mapping[str, str]:
        self.asked += 1
        return self.fields


def test_slurm_is_asked_once_however_often_the_answer_is_wanted() -> None:
    slurm = Slurm(JobState="RUNNING", Restarts="2")
    one = JobQuery(slurm, None)
    one.begin()
    one.begin()
    for _ in range(2):
        view = one.view()
        assert view is not None
        assert (view.state, view.restarts) == ("RUNNING", 2)
    one.until()
    assert slurm.asked == 1


def test_whoever_wants_the_answer_asks() -> None:
    slurm = Slurm(JobState="RUNNING")
    assert JobQuery(slurm, None).view() is not None
    assert slurm.asked == 1


def test_a_slurm_that_does_not_answer_says_nothing() -> None:
    def down() -> Mapping[str, str]:
        raise SlurmDown("down")

    assert JobQuery(down, None).view() is None


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize(("grace_s", "left_s"), [(None, DEFAULT_GRACE_S), (120.0, 120.0), (2.0, PUT_BACK_S + 1.0)])
def test_without_anybody_to_ask_there_is_what_the_site_leaves(grace_s: float | None, left_s: float) -> None:
    one = JobQuery(None, grace_s)
    assert one.view() is None
    assert one.until() == 100.0 + left_s - PUT_BACK_S


def test_the_time_counts_from_the_first_question(now: dict[str, float]) -> None:
    one = JobQuery(None, 60.0)
    one.begin()
    now["monotonic"] += 20.0
    assert one.until() == 100.0 + 60.0 - PUT_BACK_S


def test_a_machine_that_has_just_started_asks_once_too(now: dict[str, float]) -> None:
    now["monotonic"] = 0.5
    one = JobQuery(None, 60.0)
    one.begin()
    now["monotonic"] += 20.0
    assert one.until() == 0.5 + 60.0 - PUT_BACK_S


def test_ranks_have_until_the_grace_that_slurm_tells_is_over_whenever_it_answers(now: dict[str, float]) -> None:
    answer = threading.Event()

    def slow() -> Mapping[str, str]:
        answer.wait()
        return {"JobState": "RUNNING", "EndTime": "5090", "PreemptTime": "5000"}

    one = JobQuery(slow, 30.0)
    one.begin()
    assert one.until() == 100.0 + 30.0 - PUT_BACK_S
    now["wall"] += 3.0
    now["monotonic"] += 3.0
    answer.set()
    assert one.view() is not None
    assert one.until() == 100.0 + 90.0 - PUT_BACK_S


def test_an_answer_that_does_not_come_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_query, "PATIENCE_S", 0.01)
    over = threading.Event()

    def never() -> Mapping[str, str]:
        over.wait()
        return {}

    assert JobQuery(never, None).view() is None
    over.set()
