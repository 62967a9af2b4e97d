"""When to save, and when ranks talk to each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.spec import Every
from slurmtrain.runtime import interval


def test_before_the_first_save_the_interval_is_short() -> None:
    assert interval.auto_interval(None, 1) == interval.FIRST_SAVE_S


def test_the_interval_is_youngs_optimum() -> None:
    assert interval.auto_interval(2.0, 1) == pytest.approx(math.sqrt(2 * 2.0 * interval.PRIOR_MTBF_S))
    assert interval.auto_interval(2.0, 4) == pytest.approx(interval.auto_interval(2.0, 1) / 2)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 10_000))
def test_the_interval_stays_within_bounds_and_grows_with_the_cost_of_a_save(a: float, b: float, nodes: int) -> None:
    low, high = (interval.auto_interval(cost, nodes) for cost in sorted((a, b)))
    assert interval.SHORTEST_S <= low <= high <= interval.LONGEST_S


@given(st.floats(0, 1e6), st.integers(1, 10_000))
def test_more_nodes_never_make_the_interval_longer(cost: float, nodes: int) -> None:
    assert interval.auto_interval(cost, nodes + 1) <= interval.auto_interval(cost, nodes)


def due(every: Every, since: float = 0.0, stall: float | None = None) -> bool:
    return interval.is_due(every, since_save_s=since, stall_s=stall, nodes=1)


def test_a_save_every_n_minutes_is_due_when_they_have_passed() -> None:
    every = Every("minutes", 0.5)
    assert not due(every, since=29.9)
    assert due(every, since=30.0)


def test_an_automatic_save_follows_the_automatic_interval() -> None:
    every = Every("auto", 0)
    assert not due(every, since=interval.FIRST_SAVE_S - 0.1)
    assert due(every, since=interval.FIRST_SAVE_S)
    later = interval.auto_interval(5.0, 1)
    assert later > interval.FIRST_SAVE_S
    assert not due(every, since=later - 0.1, stall=5.0)
    assert due(every, since=later, stall=5.0)


@pytest.mark.parametrize(
    ("step_s", "previous", "steps"),
    [(1.0, 1, 1), (0.01, 100, 25), (0.01, 4, 8), (0.0, 8, 16), (10.0, 64, 1), (1e-9, 3, 6)],
)
def test_ranks_agree_about_four_times_a_second_and_approach_that_by_doubling(
    step_s: float, previous: int, steps: int
) -> None:
    assert interval.steps_to_agreement(step_s, previous) == steps


@given(st.just(0.0) | st.floats(1e-9, 1e3), st.integers(1, 10**6))
def test_ranks_agree_again_after_at_least_one_step(step_s: float, previous: int) -> None:
    assert 1 <= interval.steps_to_agreement(step_s, previous) <= 2 * previous
