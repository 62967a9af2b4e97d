"""What differs among the parameters of runs, and how it is written."""

from __future__ import annotations

import pytest

from slurmtrain.model.query.differing import differing, write_settings, write_value

SWEEP = [{"lr": lr, "epochs": 10, "run": {"seed": seed}} for lr in (0.1, 0.3) for seed in (0, 1)]


def test_parameters_with_different_values_differ() -> None:
    assert differing(SWEEP) == ["lr", "run.seed"]
    assert write_settings(SWEEP[1], differing(SWEEP)) == "lr=0.1 run.seed=1"


def test_what_some_runs_lack_comes_after_what_has_different_values() -> None:
    assert differing([*SWEEP, {"layers": 12, "lr": 0.1}]) == ["lr", "run.seed", "epochs", "layers"]
    assert write_settings({"layers": 12, "lr": 0.1}, ["lr", "run.seed", "layers"]) == "lr=0.1 layers=12"


@pytest.mark.parametrize("settings", [[], [{"lr": 1}], [{"lr": 1}, {"lr": 1}], [{"lr": 1}, {"lr": 1.0}], [{}, {}]])
def test_nothing_differs_in_one_run_or_among_equal_ones(settings: list[dict[str, object]]) -> None:
    assert differing(settings) == []


def test_lists_and_values_of_different_types_differ() -> None:
    assert differing([{"a": [1, 2], "b": 1, "c": None}, {"a": [2, 1], "b": True, "c": "null"}]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"), (1.0, "1.0"), (1e-05, "1e-5"), (3e20, "3e20"), (0.00012345678, "0.00012345678"), (64, "64"),
        ("1e-3", "1e-3"), (True, "true"), (None, "null"), ([1, "ü"], '[1, "ü"]'),
    ],
)  # fmt: skip
def test_values_are_written_as_people_write_them(value: object, text: str) -> None:
    assert write_value(value) == text
