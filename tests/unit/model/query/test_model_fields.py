"""The order of runs."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.errors import QueryError
from slurmtrain.model.query.fields import differing, in_order, read_sort, write_measured, write_settings, write_value


def values(key: str, *given_values: Any) -> list[Any]:
    """These values of a field ``x``, in the order of ``key``."""
    return [record.get("x") for record in in_order([{"x": value} for value in given_values], read_sort(key))]


@pytest.mark.parametrize("text", ["", ",", "-", "a,,b", "-,a"])
def test_an_order_without_a_field_is_refused(text: str) -> None:
    with pytest.raises(QueryError, match="is not an order"):
        read_sort(text)


def test_numbers_come_before_text_and_missing_values_last_in_either_direction() -> None:
    assert values("x", "b", None, 2, "a", 10, "") == [2, 10, "a", "b", None, ""]
    assert values("-x", "b", None, 2, "a", 10, "") == [10, 2, "b", "a", None, ""]


def test_texts_are_sorted_as_numbers_if_all_are() -> None:
    assert values("x", "100", "99", "1e1") == ["1e1", "99", "100"]
    assert values("x", "100", "99", "local-1") == ["100", "99", "local-1"]


def test_the_second_field_decides_among_equals_and_runs_keep_their_order_else() -> None:
    records = [{"a": a, "b": b, "n": n} for n, (a, b) in enumerate([(1, 2), (0, 1), (1, 1), (0, 1)])]
    assert [record["n"] for record in in_order(records, read_sort("-a,b"))] == [2, 0, 1, 3]


SWEEP = [{"lr": lr, "epochs": 10, "run": {"seed": seed}} for lr in (0.1, 0.3) for seed in (0, 1)]


def test_parameters_with_different_values_differ() -> None:
    assert differing(SWEEP) == ["lr", "run.seed"]
    assert write_settings(SWEEP[1], differing(SWEEP)) == "lr=0.1 run.seed=1"


def test_what_some_runs_lack_comes_after_what_has_different_values() -> None:
    assert differing([*SWEEP, {"layers": 12, "lr": 0.1}]) == ["lr", "run.seed", "epochs", "layers"]
    assert write_settings({"layers": 12, "lr": 0.1}, ["lr", "run.seed", "layers"]) == "lr=0.1 layers=12"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"), (1.0, "1"), (0.1 + 0.01, "0.11"), (1 / 3, "0.333333"), (1234567.5, "1234567.5"),
        (1e-05, "1e-5"), (3e20, "3e20"), (0.00012345678, "0.00012345678"), (64, "64"),
        ("1e-3", "1e-3"), (True, "true"), (None, "null"), ([1, "ü"], '[1, "ü"]'),
    ],
)  # fmt: skip
def test_values_are_written_as_people_write_them(value: object, text: str) -> None:
    assert write_value(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1 + 0.01, "0.11"), (3.0, "3"), (0.98765, "0.9877"), (12345.678, "12346"), (999999.0, "999999"),
        (1234567.0, "1.235e6"), (1e-05, "1e-5"), (-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_measured_numbers_have_four_figures_and_no_exponent_below_a_million(value: float, text: str) -> None:
    assert write_measured(value) == text
