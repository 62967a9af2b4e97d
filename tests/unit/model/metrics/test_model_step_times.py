"""How long steps took, how fast they were, and their distribution."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import Block
from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.metrics.step_times import (
    FinishedStep,
    distribution_of,
    error_of_rate,
    last_of_looks,
    rate_of_steps,
    step_times,
    times_of_steps,
)


def rows(attempt: int, *points: tuple[int, float]) -> Segment:
    block = Block(array("q", [step for step, _ in points]), array("d", [time for _, time in points]), {})
    return Segment(attempt, block, 0, len(points))


def test_a_step_lasts_from_the_end_of_the_one_before_it_by_the_same_ranks() -> None:
    segments = [rows(1, (1, 10.0), (2, 12.0)), rows(1, (3, 13.0), (3, 13.5)), rows(2, (3, 50.0), (4, 51.0), (14, 71.0))]
    assert step_times(segments, {}) == [
        FinishedStep(1, 2, 12.0, 2.0), FinishedStep(1, 3, 13.0, 1.0), FinishedStep(2, 4, 51.0, 1.0),
        # Nothing was logged in between: the mean of ten.
        FinishedStep(2, 14, 71.0, 2.0),
    ]  # fmt: skip


def test_a_restart_between_two_steps_is_no_step() -> None:
    assert [each.step for each in step_times([rows(1, (1, 10.0), (2, 12.0), (3, 90.0))], {1: [50.0]})] == [2]


def test_there_is_no_distribution_of_nothing() -> None:
    assert distribution_of([], 10) is None


def test_equal_times_are_one_bar_and_times_of_all_sizes_are_shown_by_their_logarithms() -> None:
    narrow = distribution_of([2.0] * 5, 10)
    assert narrow is not None
    assert [bar.steps for bar in narrow.bars] == [5]
    wide = distribution_of([0.01] * 99 + [10.0], 4)
    assert wide is not None
    assert wide.log
    assert [bar.steps for bar in wide.bars] == [99, 0, 0, 1]
    assert (wide.quantiles["p50"], wide.quantiles["p95"], wide.quantiles["max"]) == (0.01, 0.01, 10.0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.integers(1, 20))
def test_each_time_is_in_one_bar(seconds: list[float], bars: int) -> None:
    distribution = distribution_of(seconds, bars)
    assert distribution is not None
    assert sum(bar.steps for bar in distribution.bars) == distribution.count == len(seconds)
    assert distribution.bars[0].low <= min(seconds)
    assert distribution.quantiles["max"] == max(seconds)


def test_lines_that_were_there_at_the_first_look_count_as_one() -> None:
    # Twelve lines had been printed before anybody looked; then one every tenth of a second.
    steps, times = list(range(1, 13)), [0.0001 * number for number in range(12)]
    steps += [14, 15, 17]
    times += [0.25, 0.2501, 0.5]
    assert last_of_looks(steps, times, 0.1) == ([12, 15, 17], [pytest.approx(0.0011), 0.2501, 0.5])
    assert last_of_looks([], [], 0.1) == ([], [])


# --- the pace ---------------------------------------------------------------------------------------------------------


def test_the_pace_is_that_from_the_first_finished_step_to_the_last() -> None:
    assert rate_of_steps([1, 2, 3, 4, 5], [100.0, 101.0, 102.0, 103.0, 104.0]) == 1.0
    # A line for every tenth step, as scripts print them.
    assert rate_of_steps([10, 20, 30], [0.0, 5.0, 10.0]) == 2.0


def test_a_pace_is_as_uncertain_as_parts_of_the_run_differ() -> None:
    steps = list(range(1, 82))
    even = [0.5 * step for step in steps]
    assert error_of_rate(steps, even) == pytest.approx(0.0)
    # The second half is twice as fast.
    faster = [min(step, 41) + 0.5 * max(step - 41, 0) for step in steps]
    assert error_of_rate(steps, faster) == pytest.approx(1.4826 * 0.5 / 8**0.5 / 1.5)
    # What a save has cost does not count, nor do a few parts with a pause.
    assert error_of_rate(steps, [each + 9.0 * (each > 20) for each in even]) == pytest.approx(0.0)
    paused = [each + 30.0 * (each > 20) for each in even]
    assert error_of_rate(steps, paused, [(20.0, 30.0)]) == pytest.approx(0.0)
    assert error_of_rate(steps[:7], even[:7]) is None
    assert error_of_rate([], []) is None


def test_the_stalls_of_saves_between_them_do_not_count() -> None:
    stalls = [(99.0, 5.0), (102.0, 2.0), (106.0, 5.0)]
    assert rate_of_steps([1, 2, 3, 4, 5], [100.0, 101.0, 102.0, 105.0, 106.0], stalls) == 1.0


@pytest.mark.parametrize(
    ("steps", "times"), [([], []), ([3], [1.0]), ([3, 3], [1.0, 2.0]), ([1, 2], [5.0, 5.0]), ([1, 2], [5.0, 4.0])]
)
def test_too_few_steps_have_no_pace(steps: list[int], times: list[float]) -> None:
    assert rate_of_steps(steps, times) is None


def test_steps_take_the_time_between_their_ends_without_stalls() -> None:
    steps, times = [1, 2, 3, 5], [100.0, 101.0, 104.0, 108.0]
    assert times_of_steps(steps, times) == [1.0, 3.0, 2.0, 2.0]
    assert times_of_steps(steps, times, [(102.0, 2.0), (99.0, 5.0), (104.5, 2.0)]) == [1.0, 1.0, 1.0, 1.0]
    # A clock that was set back, and a script that reports a step twice.
    assert times_of_steps([1, 2, 2, 3], [100.0, 99.0, 99.5, 100.0]) == [0.5]
    assert times_of_steps([4], [1.0]) == []


def test_steps_that_are_read_four_times_a_second_take_what_they_take_on_average() -> None:
    steps = range(1, 1001)
    # A step each 10 ms, of which 25 are read at once.
    times = [100 + (step - 1) // 25 * 0.25 + step * 1e-5 for step in steps]
    took = times_of_steps(steps, times, least_s=2.0)
    assert took == pytest.approx([0.01] * len(took), rel=0.1)
    assert len(took) >= 800
