"""When a rank hangs, and which ranks are to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.hang import (
    LOOKS,
    Beat,
    Phase,
    RankState,
    Straggler,
    Stragglers,
    computing_culprits,
    describe_stack,
    find_culprits,
    hang_limit,
    longest_limit,
)

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


UNWATCHED = (Phase.NONE, Phase.JOINING, Phase.READY, Phase.STOPPING, Phase.LEFT)


@pytest.mark.parametrize(
    ("hang_after", "newest", "median_s", "limit"),
    [
        # Ten median steps, but at least a minute; one that is given stands, whatever steps take.
        (None, beat(), 0.1, 60), (None, beat(), 9.0, 90), (None, beat(), 0.0, 60),
        (5.0, beat(), 9.0, 5), (600.0, beat(), 9.0, 600),
        # The first step may take ten times as long.
        (None, beat(Phase.FIRST), 0.0, 600), (None, beat(Phase.FIRST), 9.0, 900),
        (5.0, beat(Phase.FIRST), 0.0, 50), (5.0, beat(Phase.FIRST), 99.0, 50),
        # A save may take ten times the longest one.
        *((None, beat(Phase.SAVING, save_s=s), 1.0, limit) for s, limit in ((0.0, 1860), (1.0, 360), (60.0, 660))),
        *((5.0, beat(Phase.SAVING, save_s=s), 1.0, limit) for s, limit in ((0.0, 1805), (1.0, 305), (60.0, 605))),
        # A pause may take as long as the script says. Outside the loop over steps nothing is watched.
        *((after, beat(Phase.PAUSED, pause_s=300.0), 9.0, 300) for after in (None, 5.0)),
        *((after, beat(Phase.PAUSED), 9.0, 2 * 3600) for after in (None, 5.0)),
        *((after, beat(phase), 1.0, None) for phase in UNWATCHED for after in (None, 5.0)),
    ],
)  # fmt: skip
def test_how_long_a_rank_may_finish_no_step(
    hang_after: float | None, newest: Beat, median_s: float, limit: float | None
) -> None:
    assert hang_limit(hang_after, newest, median_s) == limit


@pytest.mark.parametrize(
    ("hang_after", "limit_s", "expected"), [(None, 60, 1800), (None, 600, 4800), (5.0, 5, 40), (600.0, 600, 4800)]
)
def test_a_limit_is_raised_to_half_an_hour_or_to_eight_times_what_it_was(
    hang_after: float | None, limit_s: float, expected: float
) -> None:
    assert longest_limit(hang_after, limit_s) == expected


# --- who is to blame ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["T", "t", "D"])
def test_a_stopped_process_is_to_blame_before_a_rank_that_is_behind(letter: str) -> None:
    blamed, why = find_culprits([state(0, step=9), state(1), state(2, state=letter, stack=()), state(3)])
    assert blamed == [2]
    assert why.startswith("rank 2 (node 1) is ")
    assert f"(process state {letter})" in why
    assert "after step 10" in why
    # And before one that waits for a file server.
    assert find_culprits([state(0, state="D"), state(1, state="T")])[0] == [1]


AT = "data.py:7 load"
IN_REDUCE = "distributed_c10d.py:3000 all_reduce, called from train.py:41 main"


@pytest.mark.parametrize(
    ("ranks", "blamed", "why"),
    [
        ([state(0), state(1, step=9, stack=LOADING), state(2), state(3, step=9, stack=LOADING)], [1, 3],
         f"ranks 1 (node 0), 3 (node 1) have finished 9 steps, others 10: {AT}"),
        ([state(0), state(1, phase=Phase.READY, stack=LOADING)], [1], "not in the loop over steps"),
        ([state(0, phase=Phase.PAUSED, stack=LOADING), state(1)], [0],
         f"rank 0 (node 0) has been paused by the script, after step 10: {AT}"),
        ([state(0), state(1), state(2, stack=LOADING), state(3, stack=())], [2],
         f"rank 2 (node 1) has not reached the point where others wait, after step 10: {AT}"),
        # All are named where all wait in a collective, not only the idlest.
        ([state(0), state(1, idle_s=99.0)], [0, 1], f"all ranks wait for each other after step 10: {IN_REDUCE}"),
        # A rank without a heartbeat is not blamed for its steps.
        ([state(0), state(1, step=0, phase=Phase.NONE, stack=LOADING)], [0, 1], ""),
        ([state(0, stack=LOADING)], [0], f"rank 0 (node 0) has finished no step after step 10: {AT}"),
        ([state(0, stack=())], [0], "where they are is unknown"),
    ],
)  # fmt: skip
def test_the_ranks_that_others_wait_for_are_to_blame(ranks: list[RankState], blamed: list[int], why: str) -> None:
    culprits, reason = find_culprits(ranks)
    assert culprits == blamed
    assert reason == why if why.endswith((AT, IN_REDUCE)) else why in reason


@pytest.mark.parametrize("module", ["torch/utils/data/dataloader", "torchdata/stateful_dataloader/stateful_dataloader"])
def test_a_rank_that_waits_for_a_data_loader_worker_is_described_so(module: str) -> None:
    packages = "/venv/lib/python3.11/site-packages"
    stack = ("/lib/python3.11/selectors.py:415 select", f"{packages}/{module}.py:1291 _try_get_data", LOADING[1])
    assert describe_stack(stack) == "waiting for a worker of its DataLoader, called from train.py:30 main"


# --- who computes ---------------------------------------------------------------------------------------------------


def test_a_rank_that_others_wait_for_computes_if_its_main_thread_does() -> None:
    busy = state(1, cpu=0.9, state="R", stack=LOADING)
    assert computing_culprits([state(0, cpu=0.0), busy, state(2, cpu=0.0)]) == (
        [1],
        "rank 1 (node 0) computes: data.py:7 load",
    )
    assert computing_culprits([busy])[0] == [1]
    # It reads a file at the moment.
    assert computing_culprits([replace(busy, state="D"), state(0)])[0] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": 0.02},
        {"cpu": None},
        {"state": "T"},
        # It has begun to wait, or waits in a loop of its own for others.
        {"stack": REDUCE},
        {"stack": ("/venv/torch/cuda/__init__.py:1000 synchronize", "/home/me/train.py:41 main")},
    ],
)
def test_a_rank_that_waits_or_of_which_that_is_unknown_does_not_compute(change: dict[str, Any]) -> None:
    busy = state(0, cpu=0.9, state="R", stack=LOADING)
    assert computing_culprits([busy])[0] == [0]
    assert computing_culprits([replace(busy, **change)]) == ([], "")


def test_ranks_compute_only_if_all_that_others_wait_for_do() -> None:
    busy = state(0, cpu=0.9, stack=LOADING)
    assert computing_culprits([busy, replace(busy, rank=1)])[0] == [0, 1]
    assert computing_culprits([busy, replace(busy, rank=1, cpu=0.0)])[0] == []
    # The second is behind the first, which therefore waits for it, whatever it computes.
    assert computing_culprits([busy, replace(busy, rank=1, cpu=0.0, step=9)])[0] == []
    assert computing_culprits([]) == ([], "")


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
        cpu=st.none() | st.floats(0, 1).map(lambda value: round(value, 3)),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda state: state.rank,
)


@given(RANKS)
def test_there_is_always_a_culprit_and_a_reason(ranks: list[RankState]) -> None:
    blamed, why = find_culprits(ranks)
    assert blamed
    assert set(blamed) <= {rank.rank for rank in ranks}
    assert "step" in why


@given(RANKS)
def test_a_rank_state_survives_the_journal(ranks: list[RankState]) -> None:
    assert [RankState.from_dict(json.loads(json.dumps(rank.to_dict()))) for rank in ranks] == ranks
    assert state(0, phase=Phase.LEFT).to_dict()["phase"] == "done"


# --- which ranks hold the others up -------------------------------------------------------------------------------

EVEN = dict.fromkeys(range(4), 0.100)
SLOW = EVEN | {2: 0.200}


def looks(stragglers: Stragglers, *times: dict[int, float], count: int = LOOKS) -> list[Straggler]:
    return [found for own_s in times for _ in range(count) for found in stragglers.look(own_s)]


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    stragglers = Stragglers()
    assert looks(stragglers, SLOW, count=LOOKS - 1) == []
    assert looks(stragglers, SLOW, count=1) == [Straggler(2, 0.200, 0.100, 2.0)]
    assert looks(stragglers, SLOW, SLOW, SLOW) == []


def test_a_rank_is_reported_again_only_if_it_has_recovered() -> None:
    stragglers = Stragglers()
    assert len(looks(stragglers, SLOW)) == 1
    looks(stragglers, EVEN, count=LOOKS - 1)
    assert looks(stragglers, SLOW) == []
    looks(stragglers, EVEN)
    assert len(looks(stragglers, SLOW)) == 1


def test_a_rank_whose_time_is_not_known_is_neither_slow_nor_a_measure() -> None:
    assert looks(Stragglers(), {0: 0.0, 1: 0.0, 2: 0.1}) == []
    assert looks(Stragglers(), {0: 0.1, 1: 0.0, 2: 0.0, 3: 0.1}) == []
    stragglers = Stragglers()
    looks(stragglers, SLOW, count=LOOKS - 1)
    looks(stragglers, SLOW | {2: 0.0})
    assert len(looks(stragglers, SLOW, count=1)) == 1


@given(st.lists(st.dictionaries(st.integers(0, 5), st.floats(0, 10)), max_size=40))
def test_most_ranks_are_never_stragglers_and_each_is_slower_than_the_median(times: list[dict[int, float]]) -> None:
    stragglers = Stragglers()
    for own_s in times:
        slow = looks(stragglers, own_s)
        assert len(slow) <= len(own_s) / 2
        assert all(rank.own_s == own_s[rank.rank] > 1.5 * rank.median_s for rank in slow)
