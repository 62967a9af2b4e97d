"""Sweeps: what is wrong with one, and which runs follow."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.sweep import MAX_RUNS, check_sweep, expand_sweep


def test_all_combinations_follow_with_the_last_key_varying_fastest() -> None:
    assert expand_sweep({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_no_sweep_is_one_run_without_variation() -> None:
    assert expand_sweep({}) == [{}]


@pytest.mark.parametrize("sweep", [{}, {"a": [1]}, {"a": [1, 1.5], "b": [True, False]}, {"a": [[1], [2]]}])
def test_a_good_sweep_has_no_mistakes(sweep: object) -> None:
    assert check_sweep(sweep) == []


@pytest.mark.parametrize("sweep", [[1, 2], "a", 3])
def test_a_sweep_that_is_no_mapping_is_refused(sweep: object) -> None:
    [(key, message)] = check_sweep(sweep)
    assert key == ""
    assert message.startswith("expected a mapping")


@pytest.mark.parametrize("values", [[], 1, "1,2", None, {}])
def test_values_that_are_no_list_are_refused_at_their_key(values: object) -> None:
    [(key, message)] = check_sweep({"good": [1], "bad": values})
    assert key == "bad"
    assert message.startswith("expected a list of at least one value")


def test_a_key_that_is_written_in_sections_is_told_how_to_name_it() -> None:
    assert check_sweep({"params": {"lr": [1, 2]}}) == [("params", "name the key as a whole, as in 'params.lr: [...]'")]


def test_a_value_that_stands_twice_is_refused() -> None:
    [(key, message)] = check_sweep({"a": [1, 2, 1]})
    assert key == "a"
    assert "twice" in message


def test_a_sweep_of_too_many_runs_is_refused_and_one_at_the_limit_is_not() -> None:
    hundred = list(range(100))
    assert MAX_RUNS == 100 * 100
    assert check_sweep({"a": hundred, "b": hundred}) == []
    [(key, message)] = check_sweep({"a": hundred, "b": hundred, "c": [1, 2]})
    assert key == ""
    assert "20000 runs" in message
