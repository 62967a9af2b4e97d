"""When a rank hangs, and which ranks are to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.hang import Beat, Phase, RankState, culprits, limit, where

REDUCE = (
    "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce",
    "/home/me/train.py:41 main",
)
LOADING = ("/home/me/data.py:7 load", "/home/me/train.py:30 main")


def beat(phase: Phase = Phase.TRAINING, **more: Any) -> Beat:
    return Beat(step=10, phase=phase, **more)


def state(rank: int, **more: Any) -> RankState:
    return replace(RankState(rank, rank // 2, 10, Phase.TRAINING, 61.0, "S", REDUCE), **more)


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_hang_is_ten_median_steps_but_at_least_a_minute() -> None:
    assert limit(None, beat(), 0.1) == 60
    assert limit(None, beat(), 9.0) == 90
    assert limit(None, beat(), 0.0) == 60


def test_a_limit_that_is_given_stands_whatever_steps_take() -> None:
    assert limit(5.0, beat(), 9.0) == 5
    assert limit(600.0, beat(), 9.0) == 600


@pytest.mark.parametrize(
    ("hang_after", "median_s", "expected"), [(None, 0.0, 600), (None, 9.0, 900), (5.0, 0.0, 50), (5.0, 99.0, 50)]
)
def test_the_first_step_may_take_ten_times_as_long(hang_after: float | None, median_s: float, expected: float) -> None:
    assert limit(hang_after, beat(Phase.FIRST), median_s) == expected


@pytest.mark.parametrize(("save_s", "expected"), [(0.0, 1860), (1.0, 360), (60.0, 660)])
def test_a_save_may_take_ten_times_the_longest_one(save_s: float, expected: float) -> None:
    assert limit(None, beat(Phase.SAVING, save_s=save_s), 1.0) == expected
    assert limit(5.0, beat(Phase.SAVING, save_s=save_s), 1.0) == expected - 55


@pytest.mark.parametrize("phase", [Phase.NONE, Phase.JOINING, Phase.READY, Phase.STOPPING, Phase.DONE])
@pytest.mark.parametrize("hang_after", [None, 5.0])
def test_outside_the_loop_of_steps_nothing_is_watched(phase: Phase, hang_after: float | None) -> None:
    assert limit(hang_after, beat(phase), 1.0) is None


# --- who is to blame ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["T", "t", "D"])
def test_a_process_that_cannot_go_on_is_to_blame_before_one_that_is_behind(letter: str) -> None:
    blamed, why = culprits([state(0, step=9), state(1), state(2, state=letter, stack=()), state(3)])
    assert blamed == [2]
    assert why.startswith("rank 2 (node 1) is ")
    assert f"(process state {letter})" in why
    assert "after step 10" in why


def test_a_stopped_process_is_to_blame_before_one_that_waits_for_a_file_server() -> None:
    blamed, _ = culprits([state(0, state="D"), state(1, state="T")])
    assert blamed == [1]


def test_who_has_finished_fewer_steps_is_to_blame() -> None:
    blamed, why = culprits([state(0), state(1, step=9, stack=LOADING), state(2), state(3, step=9, stack=LOADING)])
    assert blamed == [1, 3]
    assert why == ("ranks 1 (node 0), 3 (node 1) have finished 9 steps, others 10: data.py:7 load")


def test_who_has_left_the_loop_that_others_are_in_is_to_blame() -> None:
    blamed, why = culprits([state(0), state(1, phase=Phase.READY, stack=LOADING)])
    assert blamed == [1]
    assert "not in the loop of steps" in why


def test_who_has_not_come_to_the_collective_that_others_wait_in_is_to_blame() -> None:
    blamed, why = culprits([state(0), state(1), state(2, stack=LOADING), state(3, stack=())])
    assert blamed == [2]
    assert why == "rank 2 (node 1) has not come to where others wait, after step 10: data.py:7 load"


def test_where_all_wait_in_a_collective_all_are_named_not_the_idlest() -> None:
    blamed, why = culprits([state(0), state(1, idle_s=99.0)])
    assert blamed == [0, 1]
    expected = "distributed_c10d.py:3000 all_reduce, called from train.py:41 main"
    assert why == f"all ranks wait for each other after step 10: {expected}"


def test_a_rank_that_was_never_heard_of_is_not_blamed_for_its_steps() -> None:
    blamed, _ = culprits([state(0), state(1, step=0, phase=Phase.NONE, stack=LOADING)])
    assert blamed == [0, 1]


def test_a_rank_alone_is_where_it_is() -> None:
    assert culprits([state(0, stack=LOADING)]) == (
        [0],
        "rank 0 (node 0) has finished no step after step 10: data.py:7 load",
    )
    assert culprits([state(0, stack=())])[1].endswith("where they are could not be told")


def test_of_many_ranks_some_are_named() -> None:
    _, why = culprits([state(rank, step=9 if rank else 10) for rank in range(12)])
    assert "8 (node 4) and 3 more" in why
    assert "9 (node" not in why


def test_a_place_in_a_library_is_told_with_what_called_it() -> None:
    assert where(()) == ""
    assert where(LOADING) == "data.py:7 load"
    assert where(REDUCE[:1]) == "distributed_c10d.py:3000 all_reduce"


RANKS = st.lists(
    st.builds(
        RankState,
        rank=st.integers(0, 99),
        node=st.integers(0, 9),
        step=st.integers(0, 3),
        phase=st.sampled_from(Phase),
        idle_s=st.floats(0, 1e6).map(lambda value: round(value, 1)),
        state=st.sampled_from(["", "R", "S", "D", "T", "t", "Z", "X", "I"]),
        stack=st.sampled_from([(), REDUCE, LOADING]) | st.lists(st.text()).map(tuple),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda state: state.rank,
)


@given(RANKS)
def test_somebody_is_always_blamed_in_words(ranks: list[RankState]) -> None:
    blamed, why = culprits(ranks)
    assert blamed
    assert set(blamed) <= {each.rank for each in ranks}
    assert "step" in why


@given(RANKS)
def test_what_is_known_of_a_rank_survives_a_journal(ranks: list[RankState]) -> None:
    assert [RankState.from_dict(json.loads(json.dumps(each.to_dict()))) for each in ranks] == ranks
