"""When a fault may strike, and when a drill stops waiting."""

from __future__ import annotations

from pathlib import Path
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
    Patience,
    Sighting,
    overdue,
    strike_moment,
    why_never,
)
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint

NOW = 1000.0


def saves(*steps: int | None) -> list[ExternalCheckpoint]:
    return [
        ExternalCheckpoint(path=Path(f"/c/ckpt-{step}.pt"), format="other", step=step, bytes=1, saved_at=NOW + index)
        for index, step in enumerate(steps)
    ]


def run_of(**more: Any) -> Run:
    return Run(**{"id": "RUN", "name": "n", "state": "completed", "reason": "", "executor": "local", **more})


def baseline(step: int | None = None, early: bool = False, **more: Any) -> Baseline:
    checkpoints = [Checkpoint(5, "checkpoints/step-5", 1, 1.0, 1.0, why="steps")] if early else []
    return Baseline(**{"run": run_of(step=step, checkpoints=checkpoints), "seconds": 10.0, **more})


def trains(last: int, first: int = 0, **more: Any) -> Sighting:
    return Sighting(first_step=first, last_step=last, total_steps=40, **more)


COUNTS, SAVES, PRINTS = baseline(step=40, early=True), baseline(saves=saves(5, 10, 15)), baseline(lines=9)


@pytest.mark.parametrize(
    ("reference", "sighting", "moment"),
    [
        # One that counts steps, after its first checkpoint; if that is late, half way; if it is the last, at once.
        (COUNTS, trains(3), None),
        (COUNTS, trains(6, saved="a checkpoint of step 5"), "after step 6, with a checkpoint of step 5"),
        (COUNTS, trains(10, first=10, saved="a checkpoint of step 10"), None),
        (COUNTS, trains(20), "after step 20, before its first checkpoint"),
        (baseline(step=40), trains(1), "after step 1, before its first checkpoint"),
        # One without steps, after a checkpoint that shows whether it resumes: whoever starts again from the beginning
        # saves step 5 again, which cannot be told from having resumed there.
        (SAVES, Sighting(lines=100), None),
        (SAVES, Sighting(saves=saves(5)), None),
        (SAVES, Sighting(saves=saves(5, 10)), "after its checkpoint ckpt-10.pt"),
        (baseline(saves=saves(None, None)), Sighting(saves=saves(None)), "after its checkpoint ckpt-None.pt"),
        # With neither, its output decides.
        (baseline(saves=saves(40), lines=9), Sighting(lines=4), None),
        (baseline(saves=saves(40), lines=9), Sighting(lines=5), "after line 5 of its output"),
        (PRINTS, Sighting(), None),
        (baseline(), Sighting(), None),
    ],
)
def test_a_run_is_struck_once_it_trains(reference: Baseline, sighting: Sighting, moment: str | None) -> None:
    assert strike_moment(reference, sighting) == moment


def test_a_script_that_shows_nothing_can_never_be_struck() -> None:
    assert "no way to see when it trains" in why_never(baseline())
    assert [why_never(each) for each in (baseline(step=0), PRINTS, SAVES)] == [""] * 3


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

PATIENCE = Patience(baseline=baseline(step=40), grace_s=30.0)


def why_over(after_s: float, fault: str | None, patience: Patience = PATIENCE, **attempt: Any) -> str:
    fields = {"number": 1, "job_id": "7", "restart": 0, "state": "running", "started_at": NOW, **attempt}
    injected = InjectedFault(fault=fault, at=NOW, attempt="7.0") if fault else None
    return overdue(run_of(state="running", attempts=[Attempt(**fields)]), injected, patience, NOW + after_s)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_an_end(name: str) -> None:
    assert why_over(10, name) == ""
    assert "nothing had ended its ranks" in why_over(1e4, name)


def test_a_hang_that_nothing_can_notice_ends_soon() -> None:
    patience = Patience(baseline=baseline(), grace_s=30.0, hang_after=600.0)
    assert why_over(UNNOTICED_HANG_S - 1, "hang", patience) == ""
    assert why_over(UNNOTICED_HANG_S + 1, "hang", patience)


def test_a_run_that_started_again_may_train_longer_than_the_undisturbed_one_but_not_for_ever() -> None:
    assert why_over(5 + PATIENCE.train_s - 1, "rank", restarts=[{"at": NOW + 5}]) == ""
    assert "still running" in why_over(5 + PATIENCE.train_s + 1, "rank", restarts=[{"at": NOW + 5}])


def test_time_in_the_queue_does_not_count() -> None:
    assert why_over(1e6, None, started_at=None) == ""
    assert "nothing showed that it trains" in why_over(1e6, None)
