"""How many samples of a batch ranks of different speeds get."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.data.balance import ShareAdvice, Speed, balance, fit_speed, judge, slowest_s
from slurmtrain.model.data.pace import Pace

SPEEDS = st.builds(Speed, st.floats(0, 5), st.floats(0.01, 5))


def test_a_rank_that_is_three_times_as_fast_gets_three_times_as_many() -> None:
    assert balance([Speed(0, 3.0), Speed(0, 1.0)], 16) == (4, 12)


def test_a_fixed_time_counts() -> None:
    assert balance([Speed(6.0, 1.0), Speed(0.0, 1.0)], 16) == (5, 11)


def test_a_share_stays_within_memory() -> None:
    assert balance([Speed(0, 3.0), Speed(0, 1.0)], 16, most=[None, 10]) == (6, 10)
    assert balance([Speed(0, 3.0), Speed(0, 1.0)], 16, most=[5, 10]) is None


def test_a_batch_smaller_than_the_ranks_has_no_shares() -> None:
    assert balance([Speed(0, 1.0)] * 3, 2) is None


@given(speeds=st.lists(SPEEDS, min_size=1, max_size=3), batch=st.integers(1, 12), data=st.data())
def test_no_other_division_is_faster(speeds: list[Speed], batch: int, data: st.DataObject) -> None:
    limits = st.none() | st.integers(1, 12)
    most = data.draw(st.lists(limits, min_size=len(speeds), max_size=len(speeds)))
    possible = [
        shares
        for shares in product(range(1, batch + 1), repeat=len(speeds))
        if sum(shares) == batch
        and all(limit is None or share <= limit for share, limit in zip(shares, most, strict=True))
    ]
    shares = balance(speeds, batch, most=most)
    if not possible:
        assert shares is None
        return
    assert shares in possible
    assert slowest_s(speeds, shares) <= min(slowest_s(speeds, each) for each in possible) * (1 + 1e-12)


def test_two_numbers_of_samples_tell_the_fixed_time() -> None:
    assert fit_speed({8: Pace(5.0, 0.0), 16: Pace(9.0, 0.0)}) == Speed(1.0, 0.5)


def test_one_number_of_samples_does_not() -> None:
    assert fit_speed({8: Pace(4.0, 0.1)}) == Speed(0.0, 0.5)


def test_two_numbers_that_are_close_together_say_little_if_times_scatter() -> None:
    speed = fit_speed({99: Pace(4.9, 0.1), 100: Pace(5.0, 0.1)})
    assert speed.sample_s == pytest.approx(0.05, rel=0.02)
    # Without noise they say that a tenth of a second is that of a sample, which is more than all of them can take.
    assert fit_speed({99: Pace(4.99, 1e-6), 100: Pace(5.0, 1e-6)}).sample_s == pytest.approx(0.01)


PACES = st.builds(Pace, st.floats(1e-6, 1e3), st.floats(0, 1))


@given(paces=st.dictionaries(st.integers(1, 1000), PACES, min_size=1, max_size=3))
def test_a_speed_is_positive_and_agrees_with_the_latest_time(paces: dict[int, Pace]) -> None:
    speed = fit_speed(paces)
    samples, pace = list(paces.items())[-1]
    assert speed.fixed_s >= -1e-9 * pace.seconds
    assert speed.sample_s > 0
    assert speed.seconds(samples) == pytest.approx(pace.seconds)


def test_little_gain_changes_nothing() -> None:
    speeds = [Speed(0, 1.0), Speed(0, 1.02)]
    assert judge(speeds, (0.0, 0.0), (33, 31), (32, 32)) is ShareAdvice.KEEP


def test_a_gain_that_noise_may_be_is_waited_for() -> None:
    speeds, shares, equal = [Speed(0, 1.0), Speed(0, 2.0)], (43, 21), (32, 32)
    assert judge(speeds, (0.05, 0.05), shares, equal) is ShareAdvice.CHANGE
    assert judge(speeds, (0.5, 0.5), shares, equal) is ShareAdvice.WAIT
    # What is not known of the slowest rank counts more than what is not of others.
    three, shares, equal = [Speed(0, 1.0), Speed(0, 1.0), Speed(0, 2.0)], (26, 25, 13), (21, 21, 22)
    assert judge(three, (0.05, 0.05, 0.2), shares, equal) is ShareAdvice.WAIT
    assert judge(three, (0.2, 0.05, 0.05), shares, equal) is ShareAdvice.CHANGE
