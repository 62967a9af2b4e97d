"""How far an attempt has come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.attempt_progress import Progress, points_of, read_point, steps_per_second

records = st.lists(
    st.fixed_dictionaries(
        {"t": st.floats(0, 1e9)},
        optional={
            "step": st.integers(0, 10**6) | st.just("no step"),
            "metrics": st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats(0, 1)) | st.none(),
        },
    ),
    max_size=10,
)


def test_nothing_read_is_no_progress() -> None:
    assert Progress().advance([]) == Progress(None, None, {})


def test_the_last_line_gives_the_step_and_each_metric_keeps_its_latest_value() -> None:
    lines: list[dict[str, Any]] = [
        {"t": 1.0, "step": 1, "metrics": {"loss": 0.5, "accuracy": 0.1}},
        {"t": 2.0, "step": 2, "metrics": {"loss": 0.4}},
        {"t": 3.0, "step": 3},
    ]
    assert Progress().advance(points_of(lines)) == Progress(3, 3.0, {"loss": 0.4, "accuracy": 0.1})


def test_a_line_without_a_step_is_passed_over() -> None:
    before = Progress(4, 1.0, {"loss": 1.0})
    assert before.advance(points_of([{"t": 9.0, "metrics": {"loss": 0.0}}])) == before


@given(records, st.integers(0, 10))
def test_folding_lines_in_two_goes_gives_the_same_as_in_one(lines: list[dict[str, Any]], cut: int) -> None:
    points = points_of(lines)
    assert Progress().advance(points[:cut]).advance(points[cut:]) == Progress().advance(points)


@given(records)
def test_earlier_progress_is_not_changed_by_advancing(lines: list[dict[str, Any]]) -> None:
    before = Progress(1, 1.0, {"loss": 2.0})
    before.advance(points_of(lines))
    assert before == Progress(1, 1.0, {"loss": 2.0})


def test_the_rate_is_steps_over_seconds() -> None:
    lines = [{"t": 10.0, "step": 5}, {"t": 11.0}, {"t": 12.0, "step": 11}]
    assert steps_per_second(points_of(lines)) == pytest.approx(3.0)


@pytest.mark.parametrize("lines", [[], [{"t": 1.0, "step": 1}], [{"t": 1.0, "step": 1}, {"t": 1.0, "step": 2}]])
def test_there_is_no_rate_where_the_lines_do_not_tell(lines: list[dict[str, Any]]) -> None:
    assert steps_per_second(points_of(lines)) is None


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], 10**400, {"a": 1.0}])
def test_a_value_that_is_no_number_is_left_out_and_reported(value: object) -> None:
    flaws: list[str] = []
    point = read_point({"t": 1.0, "step": 2, "metrics": {"loss": value, "lr": 0.1, "\ud800": 1.0}}, flaws)
    assert point == (2, 1.0, {"lr": 0.1})
    assert flaws == ["loss", "?"]


@pytest.mark.parametrize("record", [{"step": "2"}, {"step": True}, {"step": 2.0}, {"step": 10**30}, {}])
def test_a_line_without_a_usable_step_is_no_point_and_is_reported(record: dict[str, Any]) -> None:
    flaws: list[str] = []
    assert read_point({"t": 1.0, "metrics": {"loss": 1.0}, **record}, flaws) is None
    assert flaws == ["step"]
