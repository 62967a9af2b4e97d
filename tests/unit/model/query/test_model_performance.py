"""How fast runs were, and how much faster than one of them."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.query.performance import (
    Performance,
    Stall,
    choose_baseline,
    compare_performance,
    steps_per_second,
)


def run(name: str, **facts: Any) -> Performance:
    return Performance(id=name, name=name, state="completed", **facts)


def test_the_pace_is_that_from_the_first_finished_step_to_the_last() -> None:
    assert steps_per_second([1, 2, 3, 4, 5], [100.0, 101.0, 102.0, 103.0, 104.0]) == 1.0
    # A line for every tenth step, as scripts print them.
    assert steps_per_second([10, 20, 30], [0.0, 5.0, 10.0]) == 2.0


def test_the_stalls_of_saves_between_them_do_not_count() -> None:
    stalls = [Stall(at=99.0, seconds=5.0), Stall(at=102.0, seconds=2.0), Stall(at=106.0, seconds=5.0)]
    assert steps_per_second([1, 2, 3, 4, 5], [100.0, 101.0, 102.0, 105.0, 106.0], stalls) == 1.0


@pytest.mark.parametrize(
    ("steps", "times"), [([], []), ([3], [1.0]), ([3, 3], [1.0, 2.0]), ([1, 2], [5.0, 5.0]), ([1, 2], [5.0, 4.0])]
)
def test_too_few_steps_have_no_pace(steps: list[int], times: list[float]) -> None:
    assert steps_per_second(steps, times) is None


def test_the_speedup_is_in_samples_and_the_ideal_in_gpus() -> None:
    alone = run("alone", processes=1, gpus=1, steps_per_second=2.0, samples_per_second=64.0)
    four = run("four", processes=4, gpus=4, steps_per_second=1.5, samples_per_second=192.0)
    both = compare_performance([four, alone], choose_baseline([four, alone]))
    assert [(each.performance.name, each.speedup, each.of_ideal) for each in both] == [
        ("alone", 1.0, 1.0),
        ("four", 3.0, 0.75),
    ]


def test_a_single_process_with_four_gpus_is_four_gpus() -> None:
    alone = run("alone", processes=1, gpus=1, steps_per_second=1.0)
    data_parallel = run("dp", processes=1, gpus=4, steps_per_second=2.0)
    assert compare_performance([data_parallel], alone)[0].of_ideal == 0.5
    assert data_parallel.hours_per_1000_steps == pytest.approx(4 * 500 / 3600)


def test_without_samples_of_both_steps_are_compared() -> None:
    alone = run("alone", processes=1, steps_per_second=1.0)
    two = run("two", processes=2, steps_per_second=1.8, samples_per_second=9.0)
    assert compare_performance([two], alone)[0].speedup == pytest.approx(1.8)
    assert compare_performance([two], alone)[0].of_ideal == pytest.approx(0.9)


def test_what_is_not_known_has_no_speedup_and_is_no_baseline() -> None:
    unknown, alone = run("unknown"), run("alone", processes=1, steps_per_second=1.0)
    assert choose_baseline([unknown, alone]) == alone
    assert choose_baseline([unknown]) == unknown
    last = compare_performance([unknown, alone], alone)[-1]
    assert (last.performance, last.speedup, last.of_ideal) == (unknown, None, None)
    assert unknown.hours_per_1000_steps is None
