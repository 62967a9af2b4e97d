"""What a run has been through, as the policy weighs it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.history import (
    committed,
    decision,
    is_foreign,
    past_in_place,
    past_of,
    plain,
    policy_of,
    where_of,
)
from slurmtrain.model.interruption.policy import PriorEnd
from slurmtrain.model.run.run import Attempt, Checkpoint
from slurmtrain.model.spec.spec import RequeueSpec, write_requeue


def attempt(cause: str | None = "crash", at: float = 100.0, **more: Any) -> Attempt:
    told: dict[str, Any] = {"number": 1, "job_id": "7", "restart": 0, "cause": cause, "ended_at": at}
    return Attempt(**{**told, "state": "failed" if cause else "running", **more})


def checkpoint(step: int, saved_at: float, **more: Any) -> Checkpoint:
    return Checkpoint(step, f"checkpoints/step-{step}", 1, saved_at, 1.0, **more)


def restart(cause: str = "crash", at: float = 50.0, **more: Any) -> dict[str, Any]:
    return {"at": at, "round": 1, "past": {"cause": cause, "began_at_step": 1, "committed": 2, **more}}


def causes(*attempts: Attempt) -> list[str]:
    return [past.cause for past in past_of(attempts, [])]


# --- which ends count -----------------------------------------------------------------------------------------------


def test_every_end_counts_and_an_attempt_under_way_has_none() -> None:
    assert causes(attempt("node_fail"), attempt(None, restart=1)) == ["node_fail"]
    assert causes() == []


def test_what_was_before_a_person_started_the_run_again_counts_no_more() -> None:
    by_hand = attempt("oom", job_id="8", submission=2, asked_by="resume")
    assert causes(attempt("crash"), by_hand, attempt("hang", job_id="9", submission=3, asked_by="sync")) == [
        "oom",
        "hang",
    ]


def test_a_later_start_of_a_job_is_nobodys_wish() -> None:
    first = attempt("crash", asked_by="resume")
    assert causes(first, attempt("preempted", restart=1, asked_by="resume")) == ["crash", "preempted"]


def test_restarts_in_place_count_before_the_end_of_their_attempt() -> None:
    [first, second] = past_of([attempt("oom", restarts=(restart("hang"),))], [])
    assert (first.cause, first.in_place, first.at, first.began_at_step, first.committed) == ("hang", True, 50.0, 1, 2)
    assert (second.cause, second.in_place) == ("oom", False)
    # They count as long as the attempt is under way too.
    assert causes(attempt(None, restarts=(restart(), restart("node_fail")))) == ["crash", "node_fail"]


def test_a_restart_of_another_version_that_tells_nothing_is_passed_over() -> None:
    assert causes(attempt("oom", restarts=({"at": 1.0, "round": 1},))) == ["oom"]


# --- what of them ---------------------------------------------------------------------------------------------------


def test_an_end_tells_where_it_began_how_far_it_came_and_what_it_left() -> None:
    failures = [{"signal": "SIGKILL", "exit_code": None, "error": None, "last_lines": ["step 41", ""]}]
    saved = [checkpoint(10, 50.0), checkpoint(20, 100.5), checkpoint(30, 200.0)]
    [past] = past_of([attempt("crash", round_step=5, last_step=41, failures=failures)], saved)
    assert past == PriorEnd(
        cause="crash", at=100.0, began_at_step=5, committed=20, reached=41, where="SIGKILL step #", foreign=True
    )


def test_an_end_without_a_cause_was_lost() -> None:
    [past] = past_of([attempt(None, state="lost")], [])
    assert (past.cause, past.foreign) == ("lost", True)


def test_a_checkpoint_that_was_deleted_meanwhile_was_saved_all_the_same_and_a_damaged_one_never() -> None:
    saved = [checkpoint(10, 1.0, pruned_at=2.0), checkpoint(20, 1.0, complete=False)]
    assert committed(saved, 5.0) == 10
    assert committed([], 5.0) == 0


@pytest.mark.parametrize(
    ("failure", "where"),
    [
        ({"exit_code": 1, "error": "ValueError: 12", "last_lines": ["x"]}, "# ValueError: #"),
        ({"exit_code": 1, "error": None, "last_lines": ["a 7", "  "]}, "# a #"),
        ({"exit_code": 3}, "#"),
        ({"signal": "SIGSEGV", "last_lines": None}, "SIGSEGV"),
    ],
)
def test_a_failure_is_known_again_by_its_error_or_its_last_words(failure: dict[str, Any], where: str) -> None:
    assert where_of([failure, {"error": "another"}]) == where
    assert where_of([]) == ""


def test_an_end_from_outside_is_told_from_the_programs_own() -> None:
    assert is_foreign("node_fail", [])
    assert is_foreign("crash", [{"signal": "SIGKILL"}])
    assert not is_foreign("crash", [{"signal": "SIGSEGV"}])
    assert not is_foreign("timeout", [])


pasts = st.builds(
    PriorEnd,
    cause=st.sampled_from(["crash", "hang", "node_fail"]),
    at=st.floats(0, 1e9),
    began_at_step=st.integers(0, 9),
    committed=st.integers(0, 9),
    reached=st.none() | st.integers(0, 9),
    where=st.text(max_size=5),
    foreign=st.booleans(),
    in_place=st.just(True),
)


@given(pasts)
def test_what_is_journaled_of_an_end_gives_the_same_end(past: PriorEnd) -> None:
    assert past_in_place(plain(past), past.at) == past


# --- what follows ---------------------------------------------------------------------------------------------------


def test_the_policy_is_that_of_the_last_attempt() -> None:
    strict = attempt("node_fail", policy=write_requeue(RequeueSpec(enabled=False)))
    lenient = attempt("node_fail", policy=write_requeue(RequeueSpec()), restart=1)
    assert decision([strict, lenient], []).again
    assert not decision([lenient, strict], []).again
    assert policy_of(attempt(policy=None)) == RequeueSpec()
    assert policy_of(attempt(policy={"max_failures": 7, "of_another_version": 1})).max_failures == 7
