"""Passing over a checkpoint that ranks crashed from."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.policy import PriorEnd
from slurmtrain.model.interruption.resume_point import suspects
from slurmtrain.model.run.run import CAUSES


def end(cause: str, began_from: str | None, left: str | None, where: str = "w", **fields: Any) -> PriorEnd:
    return PriorEnd(cause=cause, at=1.0, began_from=began_from, left=left, where=where, **fields)


def test_what_ranks_crashed_from_before_they_made_another_is_suspected_with_the_reason() -> None:
    assert suspects([end("preempted", "a", "b"), end("crash", "b", "b", "KeyError")]) == {
        "b": "its ranks crashed (KeyError) before they had made another"
    }
    assert set(suspects([end("crash", "b", None, "")])) == {"b"}


def test_other_ends_say_nothing_about_a_checkpoint() -> None:
    for cause in set(CAUSES) - {"crash"}:
        assert suspects([end(cause, "a", "a")]) == {}
    # A crash from outside, or after another one was made.
    for crash in (end("crash", "a", "a", foreign=True), end("crash", "a", "b"), end("crash", None, "b")):
        assert suspects([crash]) == {}


def test_two_checkpoints_that_crash_in_the_same_way_are_both_cleared() -> None:
    same = [end("crash", "new", "new", "KeyError"), end("crash", "old", "old", "KeyError")]
    assert suspects(same) == {}
    assert set(suspects([*same, end("crash", "other", "other", "EOFError")])) == {"other"}
    assert set(suspects([end("crash", "c", "c", "EOFError"), end("crash", "b", "b", "KeyError")])) == {"b", "c"}


ENDS = st.builds(
    end,
    st.sampled_from(CAUSES),
    st.sampled_from([None, "a", "b", "c"]),
    st.sampled_from([None, "a", "b", "c"]),
    st.sampled_from(["", "x", "y"]),
    foreign=st.booleans(),
)


@given(st.lists(ENDS))
def test_only_what_ranks_started_from_is_suspected_whatever_happened(history: list[PriorEnd]) -> None:
    crashed = {past.began_from for past in history if past.cause == "crash" and not past.foreign}
    assert suspects(history).keys() <= crashed
