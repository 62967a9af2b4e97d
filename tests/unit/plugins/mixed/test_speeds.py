"""How long a rank takes for a step, how sure that is, and shares that suit the speeds of ranks."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.plugins.mixed import (
    LEAST_TIMES,
    Pace,
    ShareAdvice,
    Speed,
    balance,
    fit_speed,
    judge,
    pace_of,
    samples_that_fit,
    since_change,
    slowest_s,
)

TIMES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


def noisy(seed: int, count: int, seconds: float = 1.0, noise: float = 0.3, alike: float = 0.0) -> list[float]:
    """Times of steps, each of which a part ``alike`` of the disturbance of the one before disturbs, too."""
    numbers, times, shift = Random(seed), [], 0.0
    for _ in range(count):
        shift = alike * shift + (1 - alike**2) ** 0.5 * numbers.gauss(0, noise)
        times.append(seconds * 2.718281828**shift)
    return times


@pytest.mark.parametrize("alike", [0.0, 0.5])
@pytest.mark.parametrize("count", [5, 10, 20, 40])
def test_a_pace_is_off_by_about_its_error(count: int, alike: float) -> None:
    paces = [pace_of(noisy(seed, count, alike=alike)) for seed in range(300)]
    outside = sum(abs(pace.seconds - 1) > 3 * pace.error * pace.seconds for pace in paces)
    assert outside <= 15
    # And not by far less, or nothing would ever be sure.
    assert sum(abs(pace.seconds - 1) > 0.3 * pace.error for pace in paces) > 60


def test_a_single_long_step_says_nothing() -> None:
    pace = pace_of([1.0, 1.0, 30.0, 1.0, 1.0])
    assert pace.seconds == 1.0
    assert pace.error < 0.05


@given(times=TIMES)
def test_a_pace_is_one_of_the_times_or_between_them(times: list[float]) -> None:
    pace = pace_of(times)
    assert min(times) * 0.999 <= pace.seconds <= max(times) * 1.001
    assert pace.error > 0


@given(times=TIMES)
def test_what_is_kept_since_a_change_is_the_end(times: list[float]) -> None:
    kept = since_change(times)
    assert kept == times[-len(kept) :]
    assert len(kept) >= min(len(times), LEAST_TIMES)


@pytest.mark.parametrize(("slower", "noise"), [(0.25, 0.3), (4.0, 0.3), (2.0, 0.1), (1.2, 0.02)])
def test_times_before_a_change_are_left_out_soon(slower: float, noise: float) -> None:
    left_out = 0
    for seed in range(50):
        times = noisy(seed, 35, noise=noise)
        for count, seconds in enumerate(noisy(1000 + seed, 15, slower, noise), start=1):
            times = since_change([*times, seconds][-40:])
            if len(times) <= count + 2:
                left_out += 1
                break
    assert left_out >= 40


def test_equal_times_that_scatter_are_all_kept() -> None:
    kept = [len(since_change(noisy(seed, 40))) for seed in range(200)]
    assert sum(count < 40 for count in kept) <= 6


def test_a_pace_differs_by_more_than_noise_and_a_tenth() -> None:
    assert not Pace(1.05, 0.001).differs_from(Pace(1.0, 0.001))
    assert Pace(1.2, 0.001).differs_from(Pace(1.0, 0.001))
    assert not Pace(1.2, 0.1).differs_from(Pace(1.0, 0.001))
    assert Pace(0.5, 0.1).differs_from(Pace(1.0, 0.1))


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


def test_as_many_samples_fit_as_their_memory_says() -> None:
    # 4 bytes a sample, beside 200.
    assert samples_that_fit(total=1000, before=200, peak=280, samples=20) == (850 - 200) // 4
    assert samples_that_fit(total=300, before=200, peak=280, samples=20) == 20
    assert samples_that_fit(total=1000, before=200, peak=200, samples=20) is None
