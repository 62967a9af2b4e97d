"""How sure the pace of a rank is, by times that scatter."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.data.pace import LEAST_TIMES, Pace, pace_of, since_change

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
