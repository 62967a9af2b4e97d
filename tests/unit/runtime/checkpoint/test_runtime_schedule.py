"""When rank 0 wants a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmtrain.model.experiment.checkpoint import Every, EveryAuto, EveryMinutes, EverySteps
from slurmtrain.model.interruption.interval import InterruptionStats, SaveReason
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.checkpoint import checkpointer
from slurmtrain.runtime.checkpoint.checkpointer import Schedule
from slurmtrain.runtime.checkpoint.saver import Save
from slurmtrain.system.files import write_json
from slurmtrain.system.journal import Journal


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpointer, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def make(run: RunDir, every: Every, journal: Journal | None = None) -> Schedule:
    made = Schedule(run, every, InterruptionStats(), 2, journal)
    made.begin()
    return made


def journaled(run: RunDir) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.path / "rank-0.jsonl").read_text().splitlines()]


def test_an_interval_of_minutes_begins_anew_with_each_save(run: RunDir, clock: Clock) -> None:
    plan = make(run, EveryMinutes(2))
    clock.now += 119
    assert plan.due(1) is SaveReason.NONE
    clock.now += 1
    assert plan.due(1) is SaveReason.INTERVAL
    plan.began()
    assert plan.due(1) is SaveReason.NONE


def test_an_interval_of_steps_asks_no_clock(run: RunDir, clock: Clock) -> None:
    plan = make(run, EverySteps(10))
    clock.now += 1e6
    assert [step for step in range(31) if plan.due(step) is SaveReason.STEPS] == [10, 20, 30]
    assert [plan.next_step(step) for step in (0, 9, 10, 11)] == [10, 10, 20, 20]
    assert make(run, EveryMinutes(10)).next_step(0) is None


def test_auto_follows_what_saves_cost_and_says_so(run: RunDir, clock: Clock) -> None:
    with Journal(run.path / "rank-0.jsonl") as journal:
        plan = make(run, EveryAuto(), journal)
        clock.now += 29
        assert plan.due(1) is SaveReason.NONE
        clock.now += 1
        assert plan.due(1) is SaveReason.INTERVAL
        plan.began()
        plan.ended(Save(step=5, stall_s=1.0, seconds=4.0))
        clock.now += 60
        assert plan.due(1) is SaveReason.NONE
        plan.ended(Save(step=6, stall_s=1.0, seconds=4.0))
    first, second = journaled(run)
    assert (first["kind"], first["stall_s"]) == ("interval", None)
    assert (second["stall_s"], second["save_s"]) == (1.0, 4.0)
    assert float(str(second["seconds"])) > 60


def test_a_save_that_failed_says_nothing_of_what_saves_cost(run: RunDir, clock: Clock) -> None:
    with Journal(run.path / "rank-0.jsonl") as journal:
        plan = make(run, EveryAuto(), journal)
        plan.ended(Save(step=5, problem="no space", stall_s=100.0))
    assert [event["stall_s"] for event in journaled(run)] == [None]


def test_a_wish_is_seen_within_a_second_and_fulfilled_once(run: RunDir, clock: Clock) -> None:
    plan = make(run, EverySteps(10))
    write_json(run.request, {"request": "abc", "t": 1.0})
    assert plan.due(1) is SaveReason.NONE
    clock.now += 1
    assert plan.due(1) is SaveReason.REQUESTED
    assert plan.due(1) is SaveReason.REQUESTED
    assert plan.take_request() == "abc"
    clock.now += 5
    assert (plan.due(1), plan.take_request()) == (SaveReason.NONE, None)
    write_json(run.request, {"request": "def", "t": 2.0})
    clock.now += 1
    assert (plan.due(1), plan.take_request()) == (SaveReason.REQUESTED, "def")


def test_a_wish_from_before_the_attempt_is_not_its(run: RunDir, clock: Clock) -> None:
    write_json(run.request, {"request": "abc", "t": 1.0})
    plan = make(run, EverySteps(10))
    clock.now += 10
    assert plan.due(1) is SaveReason.NONE


def test_a_wish_that_cannot_be_read_is_none(run: RunDir, clock: Clock) -> None:
    plan = make(run, EverySteps(10))
    run.request.write_text("{")
    clock.now += 1
    assert plan.due(1) is SaveReason.NONE
    run.request.unlink()
    clock.now += 1
    assert plan.due(1) is SaveReason.NONE
