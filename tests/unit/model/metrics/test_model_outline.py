"""Curves as lines that can be drawn."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.outline import outline


def test_values_that_are_not_finite_are_gaps() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, math.nan, 4.0, 5.0]
    assert outline(range(8), ys, 80) == [[(0, 1.0), (1, 2.0)], [(3, 3.0)], [(6, 4.0), (7, 5.0)]]


def test_nothing_finite_gives_no_line() -> None:
    assert outline([1.0, 2.0], [math.nan, math.inf], 80) == []


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400), st.integers(1, 8))
def test_thinned_lines_keep_order_and_extremes(ys: list[float], columns: int) -> None:
    lines = outline(range(len(ys)), ys, columns)
    finite = [y for y in ys if math.isfinite(y)]
    drawn = [point for line in lines for point in line]
    assert [x for x, _ in drawn] == sorted({x for x, _ in drawn})
    assert {ys[int(x)] for x, _ in drawn} == {y for _, y in drawn}
    if finite:
        assert (min(y for _, y in drawn), max(y for _, y in drawn)) == (min(finite), max(finite))
    assert len(drawn) <= max(4 * columns, 4 * (columns + 1))


def test_a_column_without_any_finite_value_is_a_gap_among_many_points() -> None:
    ys = [1.0] * 400 + [math.nan] * 200 + [2.0] * 400
    assert len(outline(range(1000), ys, 10)) == 2
