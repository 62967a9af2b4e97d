"""How long steps took, and their distribution."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import Block
from slurmtrain.model.metrics.curves import Segment
from slurmtrain.model.metrics.step_times import FinishedStep, distribution_of, last_of_looks, step_times


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
