"""How far an attempt has come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.progress import Progress, steps_per_second

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
    assert Progress().advance(lines) == Progress(3, 3.0, {"loss": 0.4, "accuracy": 0.1})


def test_a_line_without_a_step_is_passed_over() -> None:
    assert Progress(4, 1.0, {"loss": 1.0}).advance([{"t": 9.0, "metrics": {"loss": 0.0}}]) == Progress(
        4, 1.0, {"loss": 1.0}
    )


@given(records, st.integers(0, 10))
def test_folding_lines_in_two_goes_gives_the_same_as_in_one(lines: list[dict[str, Any]], cut: int) -> None:
    assert Progress().advance(lines[:cut]).advance(lines[cut:]) == Progress().advance(lines)


@given(records)
def test_earlier_progress_is_not_changed_by_advancing(lines: list[dict[str, Any]]) -> None:
    before = Progress(1, 1.0, {"loss": 2.0})
    before.advance(lines)
    assert before == Progress(1, 1.0, {"loss": 2.0})


def test_the_rate_is_steps_over_seconds() -> None:
    lines = [{"t": 10.0, "step": 5}, {"t": 11.0}, {"t": 12.0, "step": 11}]
    assert steps_per_second(lines) == pytest.approx(3.0)


@pytest.mark.parametrize("lines", [[], [{"t": 1.0, "step": 1}], [{"t": 1.0, "step": 1}, {"t": 1.0, "step": 2}]])
def test_there_is_no_rate_where_the_lines_do_not_tell(lines: list[dict[str, Any]]) -> None:
    assert steps_per_second(lines) is None
