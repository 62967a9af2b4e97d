"""When a fault may strike, and when a drill stops waiting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    UNNOTICED_HANG_S,
    Baseline,
    InjectedFault,
    OwnCheckpoint,
    Patience,
    Sighting,
    overdue,
    strike_moment,
    why_never,
)

NOW = 1000.0


def saves(*steps: int | None) -> list[OwnCheckpoint]:
    return [OwnCheckpoint(f"/c/ckpt-{step}.pt", step, NOW + index) for index, step in enumerate(steps)]


def baseline(step: int | None = None, early: bool = False, **more: Any) -> Baseline:
    checkpoints = [Checkpoint(5, "checkpoints/step-5", 1, 1.0, 1.0, why="steps")] if early else []
    run = Run(
        id="REF", name="n", state="completed", reason="", executor="local", step=step, checkpoints=checkpoints
    )  # fmt: skip
    return Baseline(**{"run": run, "seconds": 10.0, **more})


def test_a_run_that_counts_steps_is_struck_after_its_first_checkpoint() -> None:
    reference = baseline(step=40, early=True)
    trains = Sighting(first_step=0, last_step=3, total_steps=40)
    assert strike_moment(reference, trains) is None
    saved = Sighting(first_step=0, last_step=6, total_steps=40, saved="a checkpoint of step 5")
    assert strike_moment(reference, saved) == "after step 6, with a checkpoint of step 5"


def test_a_run_that_resumes_is_not_struck_before_its_first_step() -> None:
    sighting = Sighting(first_step=10, last_step=10, total_steps=40, saved="a checkpoint of step 10")
    assert strike_moment(baseline(step=40, early=True), sighting) is None


def test_a_run_that_saves_only_at_its_end_is_struck_after_its_first_step() -> None:
    sighting = Sighting(first_step=0, last_step=1, total_steps=40)
    assert strike_moment(baseline(step=40), sighting) == "after step 1, before its first checkpoint"


def test_a_run_whose_first_checkpoint_is_late_is_struck_half_way() -> None:
    assert strike_moment(baseline(step=40, early=True), Sighting(first_step=0, last_step=20, total_steps=40))


def test_a_script_without_steps_is_struck_after_a_checkpoint_that_shows_whether_it_resumes() -> None:
    reference = baseline(saves=saves(5, 10, 15))
    assert strike_moment(reference, Sighting(lines=100)) is None
    # Whoever starts again from the beginning saves step 5 again, which cannot be told from having resumed there.
    assert strike_moment(reference, Sighting(saves=saves(5))) is None
    assert strike_moment(reference, Sighting(saves=saves(5, 10))) == "after its checkpoint ckpt-10.pt"


def test_a_checkpoint_without_a_step_suffices() -> None:
    assert strike_moment(baseline(saves=saves(None, None)), Sighting(saves=saves(None)))


def test_without_steps_and_early_checkpoints_its_output_decides() -> None:
    reference = baseline(saves=saves(40), lines=9)
    assert strike_moment(reference, Sighting(lines=4)) is None
    assert strike_moment(reference, Sighting(lines=5)) == "after line 5 of its output"
    assert strike_moment(baseline(lines=1), Sighting()) is None


def test_a_script_that_shows_nothing_can_never_be_struck() -> None:
    assert "nothing shows when it trains" in why_never(baseline())
    assert strike_moment(baseline(), Sighting()) is None
    for reference in (baseline(step=0), baseline(lines=1), baseline(saves=saves(1))):
        assert why_never(reference) == ""


@given(lines=st.integers(0, 9), first=st.none() | st.integers(0, 9), last=st.none() | st.integers(0, 9))
def test_nothing_is_struck_before_there_is_evidence_that_it_trains(
    lines: int, first: int | None, last: int | None
) -> None:
    sighting = Sighting(first_step=first, last_step=last, total_steps=9)
    for reference in (baseline(step=9), baseline(step=9, early=True), baseline(lines=lines), baseline(saves=saves(1))):
        if strike_moment(reference, sighting) is not None:
            assert last is not None
            assert last > (first or 0)


# --- how long to wait -------------------------------------------------------------------------------------------------


def running(started_at: float | None = NOW, **more: Any) -> Run:
    attempt = Attempt(number=1, job_id="7", restart=0, state="running", started_at=started_at, **more)
    return Run(id="RUN", name="n", state="running", reason="", executor="local", attempts=[attempt])


def struck(fault: str) -> InjectedFault:
    return InjectedFault(fault=fault, at=NOW, attempt="7.0")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_an_end(name: str) -> None:
    patience = Patience(baseline=baseline(step=40), grace_s=30.0)
    assert overdue(running(), struck(name), patience, NOW + 10) == ""
    assert "nothing had ended its ranks" in overdue(running(), struck(name), patience, NOW + 1e4)


def test_a_hang_that_nothing_can_notice_ends_soon() -> None:
    patience = Patience(baseline=baseline(), grace_s=30.0, hang_after=600.0)
    assert overdue(running(), struck("hang"), patience, NOW + UNNOTICED_HANG_S - 1) == ""
    assert overdue(running(), struck("hang"), patience, NOW + UNNOTICED_HANG_S + 1)


def test_a_run_that_started_again_may_train_longer_than_the_undisturbed_one_but_not_for_ever() -> None:
    patience = Patience(baseline=baseline(step=40), grace_s=30.0)
    again = running(restarts=[{"at": NOW + 5}])
    assert overdue(again, struck("rank"), patience, NOW + 5 + patience.train_s - 1) == ""
    assert "still running" in overdue(again, struck("rank"), patience, NOW + 5 + patience.train_s + 1)


def test_time_in_the_queue_does_not_count() -> None:
    patience = Patience(baseline=baseline(step=40), grace_s=30.0)
    assert overdue(running(started_at=None), None, patience, NOW + 1e6) == ""
    assert "nothing showed that it trains" in overdue(running(), None, patience, NOW + 1e6)
