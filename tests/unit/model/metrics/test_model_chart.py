"""Charts of metrics, and what of a curve is drawn."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.chart import Series, View, make_chart, outline, rollbacks, ticks
from slurmtrain.model.metrics.curves import Curve, Points


def points(values: list[float], *, first: int = 1, time: float = 1000.0, attempt: int = 1) -> Points:
    """A point a second and a step."""
    result = Points()
    for index, value in enumerate(values):
        result.append(attempt, first + index, time + index, value)
    return result


def test_curves_are_drawn_over_steps_or_over_the_time_since_the_run_began() -> None:
    series = [Series("a", Curve(points([3.0, 2.0])), since=940.0)]
    assert make_chart("loss", series, View()).traces[0].lines == [[(1, 3.0), (2, 2.0)]]
    by_time = make_chart("loss", series, View(by_time=True))
    assert (by_time.x_label, by_time.traces[0].lines) == ("seconds", [[(60.0, 3.0), (61.0, 2.0)]])


def test_a_logarithm_has_gaps_where_there_is_none() -> None:
    chart = make_chart("loss", [Series("a", Curve(points([100.0, 0.0, 1.0])), since=0.0)], View(log=True))
    assert chart.traces[0].lines == [[(1, 2.0)], [(3, 0.0)]]


def test_attempts_are_marked_of_a_single_run_only() -> None:
    series = Series("a", Curve(points([1.0, 2.0])), since=1000.0, starts=[(1, 1001.0), (None, 1002.0)])
    assert make_chart("loss", [series], View()).marks == [1.0]
    assert make_chart("loss", [series], View(by_time=True)).marks == [1.0, 2.0]
    assert make_chart("loss", [series, series], View()).marks == []


def test_what_was_superseded_is_a_line_for_each_rollback() -> None:
    superseded = points([1.0, 2.0], first=5)
    for row in points([3.0, 4.0], first=4, attempt=2).rows():
        superseded.append(*row)
    chart = make_chart("loss", [Series("a", Curve(points([9.0]), superseded), since=0.0)], View())
    assert chart.traces[0].faint == [[(5, 1.0), (6, 2.0)], [(4, 3.0), (5, 4.0)]]


def test_two_rollbacks_of_an_attempt_are_two_lines_though_steps_increase_over_both() -> None:
    kept, superseded = Points(), Points()
    # Trained to 12, back to 10, on to 22, back to 20, and on.
    for time, step, is_kept in [
        (11, 11, 0),
        (12, 12, 0),
        (13, 11, 1),
        (14, 12, 1),
        (15, 21, 0),
        (16, 22, 0),
        (17, 21, 1),
    ]:
        (kept if is_kept else superseded).append(1, step, float(time), 0.5)
    assert [list(part.steps) for part in rollbacks(Curve(kept, superseded))] == [[11, 12], [21, 22]]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_round_few_and_inside(low: float, span: float, most: int) -> None:
    high = low + span
    places = ticks(low, high, most)
    assert len(places) <= most + 1
    # Far from zero, numbers are further apart than a hundredth of a small span.
    slack = max(span / 100, 4 * math.ulp(max(abs(low), abs(high))))
    assert all(low - slack <= place <= high + slack for place in places)


def test_values_that_are_not_finite_are_gaps() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, math.nan, 4.0, 5.0]
    assert outline(range(8), ys, 80) == [[(0, 1.0), (1, 2.0)], [(3, 3.0)], [(6, 4.0), (7, 5.0)]]


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


def test_a_chart_has_an_extent_even_of_one_point_and_of_none() -> None:
    assert make_chart("loss", [Series("a", Curve(points([0.0])), since=0.0)], View()).limits == (
        (0.9, 1.1),
        (-1.0, 1.0),
    )
    assert make_chart("loss", [Series("a", Curve(), since=0.0)], View()).limits == ((-1.0, 1.0), (-1.0, 1.0))
