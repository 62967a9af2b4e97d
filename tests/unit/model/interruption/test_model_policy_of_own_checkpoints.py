"""Progress of scripts that save by themselves: by the content of their checkpoints, which may have no step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmtrain.model.experiment.sections import RequeueSpec
from slurmtrain.model.interruption.policy import Decision, PriorEnd, decide, prior_ends, suspects
from slurmtrain.model.run.run import CAUSES, Attempt

RULES = RequeueSpec()


def end(cause: str, began_from: str | None, left: str | None, where: str = "", **fields: Any) -> PriorEnd:
    return PriorEnd(cause=cause, at=1.0, began_from=began_from, left=left, where=where, **fields)


def after(*pasts: PriorEnd) -> Decision:
    return decide(pasts, RULES)


def test_a_run_that_rewrites_one_file_without_a_step_makes_progress() -> None:
    history = [end("node_fail", None, "at 105"), end("node_fail", "at 105", "at 172"), end("lost", "at 172", "at 269")]
    assert after(*history).again
    assert "1 of 10 without a new checkpoint" in after(*history).why
    assert after(*history, end("timeout", "at 269", "at 300")).again
    assert after(*[end("timeout", str(step), str(step + 1)) for step in range(20)]).again


@pytest.mark.parametrize("cause", ["timeout", "crash"])
def test_the_same_content_three_times_is_no_progress_whatever_its_number(cause: str) -> None:
    stuck = [end(cause, "x", "x", began_at_step=n, committed=n + 1, where=f"w{n}") for n in range(3)]
    assert not after(*stuck).again
    # A file that goes back and forth between two contents does not make progress either.
    back = [end("node_fail", "y", "x"), end("timeout", "x", "y"), end("timeout", "y", "x"), end("timeout", "x", "y")]
    assert not after(*back).again


def test_a_crash_with_a_checkpoint_without_a_step_is_not_before_the_first_step() -> None:
    decision = after(end("crash", None, "x", where="ValueError"))
    assert decision.again
    assert "from its newest checkpoint" in decision.why
    assert not after(end("crash", None, None, where="ValueError")).again


def test_a_timeout_without_a_new_checkpoint_stops_a_run_whose_steps_are_known() -> None:
    assert not after(end("timeout", "x", "x", reached=7)).again
    # Continuing from an older one, in a second round, is no progress either.
    assert not after(end("crash", "x", "x", in_place=True), end("timeout", "older", "older", reached=7)).again


ATTEMPT = Attempt(number=1, job_id="7", restart=0, state="lost", cause="lost", hosts={"0": "n0"}, last_word=True)


def test_what_a_killed_attempt_left_is_what_the_next_one_found() -> None:
    killed = replace(ATTEMPT, began_from="a", left="a", last_word=False)
    following = replace(ATTEMPT, number=2, restart=1, began_from="b", left="b")
    assert [past.left for past in prior_ends([killed, following], [])] == ["b", "b"]
    # What is older than the newest does not say what the newest is.
    passed_over = replace(following, passed_over=({"path": "/x"},))
    assert prior_ends([killed, passed_over], [])[0].left == "a"
    assert prior_ends([replace(killed, last_word=True), following], [])[0].left == "a"


def test_an_end_in_place_is_journaled_with_its_checkpoints() -> None:
    past = end("crash", "a", "b", in_place=True)
    assert PriorEnd.from_restart(past.to_dict(), at=1.0) == past
    old = {"cause": "crash", "began_at_step": 1, "committed": 2}
    assert (PriorEnd.from_restart(old, at=1.0).began_from, PriorEnd.from_restart(old, at=1.0).left) == (None, None)


# --- passing over a checkpoint that ranks crashed from ------------------------------------------------------------


def test_what_ranks_crashed_from_before_they_made_another_is_suspected_with_the_reason() -> None:
    assert suspects([end("preempted", "a", "b"), end("crash", "b", "b", "KeyError")]) == {
        "b": "its ranks crashed (KeyError) before they had made another"
    }
    assert set(suspects([end("crash", "b", None, "")])) == {"b"}


def test_other_ends_say_nothing_about_a_checkpoint() -> None:
    for cause in set(CAUSES) - {"crash"}:
        assert suspects([end(cause, "a", "a")]) == {}
    # A crash from outside, or after another one was made.
    for crash in (
        end("crash", "a", "a", foreign=True),
        end("crash", "a", "b"),
        end("crash", None, "b"),
    ):
        assert suspects([crash]) == {}


def test_two_checkpoints_that_crash_in_the_same_way_are_both_cleared() -> None:
    same = [end("crash", "new", "new", "KeyError"), end("crash", "old", "old", "KeyError")]
    assert suspects(same) == {}
    assert set(suspects([*same, end("crash", "other", "other", "EOFError")])) == {"other"}
    assert set(suspects([end("crash", "c", "c", "EOFError"), end("crash", "b", "b", "KeyError")])) == {
        "b",
        "c",
    }
