"""Steps and metrics from lines that a script writes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.script_output import (
    CsvReader,
    JsonReader,
    LineReader,
    PatternReader,
    StepCounter,
    as_number,
    as_steps,
)

LOSS = r"loss=(?P<loss>\S+)"


def points(reader: LineReader, lines: list[str], counted: int = 0) -> list[tuple[int, dict[str, float]]]:
    counter = StepCounter(counted)
    placed = [counter.place(row) for line in lines if (row := reader.read(line)) is not None]
    return [(each[0], dict(each[1])) for each in placed if each is not None]


def test_named_groups_are_metrics_and_the_step_is_in_the_same_line() -> None:
    reader = PatternReader(LOSS, r"step (?P<step>\d+)")
    assert points(reader, ["hello", "step 5: loss=0.5, lr=1e-3", "step 6: loss=0.25;"]) == [
        (5, {"loss": 0.5}), (6, {"loss": 0.25}),
    ]  # fmt: skip


def test_the_step_may_be_in_a_line_before() -> None:
    reader = PatternReader(LOSS, r"iter ([\d,]+)")
    lines = ["loss=9", "iter 1,000", "loss=3", "loss=2", "iter 1,001"]
    # What comes before any step belongs to none.
    assert points(reader, lines) == [(1000, {}), (1000, {"loss": 3.0}), (1000, {"loss": 2.0}), (1001, {})]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.5,", 1.5), ("[2e-3]", 2e-3), ("-inf", -math.inf), ("90%", 90.0), ("12k", None), ("", None), ("1" * 50, None)],
)
def test_numbers_are_read_as_programs_print_them(text: str, number: float | None) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize(
    ("text", "steps"), [("1,000", 1000), ("12.0", 12), ("1.5", None), ("-1", None), ("nan", None), ("1e20", None)]
)
def test_steps_are_whole(text: str, steps: int | None) -> None:
    assert as_steps(text) == steps


def test_columns_of_csv_are_metrics_and_empty_cells_are_none() -> None:
    lines = ["\ufeffepoch,iter,loss,note", "0,10,0.5,fine", "", "0,20,,", "garbage"]
    assert points(CsvReader("iter"), lines) == [(10, {"epoch": 0.0, "loss": 0.5}), (20, {"epoch": 0.0})]


def test_a_repeated_header_is_no_row_and_semicolons_may_separate() -> None:
    assert points(CsvReader(None), ["step;loss", "1;2", "step;loss;acc", "2;1;0.5"]) == [
        (1, {"loss": 2.0}), (2, {"loss": 1.0, "acc": 0.5}),
    ]  # fmt: skip


def test_a_column_that_is_not_there_is_a_problem() -> None:
    reader = CsvReader("iter")
    reader.read("step,loss")
    assert reader.problem == "there is no column 'iter'; the columns are step, loss"


def test_numbers_of_json_objects_are_metrics() -> None:
    lines = [
        '{"step": 1, "loss": 0.5, "name": "x", "ok": true, "more": {"a": 1}}',
        "torn {",
        "[1]",
        '{"step": 2, "loss": NaN}',
    ]
    first, second = points(JsonReader(None), lines)
    assert first == (1, {"loss": 0.5})
    assert math.isnan(second[1]["loss"])


@given(st.text(max_size=80))
def test_no_line_is_too_strange(line: str) -> None:
    readers: list[LineReader] = [
        PatternReader(r"(?P<a>.*)", r"(.*)"),
        CsvReader(None),
        CsvReader("x"),
        JsonReader(None),
    ]
    for reader in readers:
        reader.read("x,y")
        reader.read(line)
