"""The mean of a metric over runs that repeat each other."""

from __future__ import annotations

import math

from slurmtrain.model.metrics.curves import Points
from slurmtrain.model.metrics.means import mean_curve


def points(*rows: tuple[int, float, float]) -> Points:
    """Points of one attempt: step, time, value."""
    result = Points()
    for step, time, value in rows:
        result.append(1, step, time, value)
    return result


def test_each_step_has_the_mean_of_the_runs_that_have_it_and_the_time_since_each_began() -> None:
    first = points((1, 101.0, 1.0), (2, 102.0, 2.0), (4, 104.0, math.nan))
    second = points((2, 1004.0, 4.0), (3, 1006.0, 5.0), (4, 1008.0, 6.0))
    curve = mean_curve([(first, 100.0), (second, 1000.0)])
    assert list(curve.means.rows()) == [(1, 1, 1.0, 1.0), (1, 2, 3.0, 3.0), (1, 3, 6.0, 5.0), (1, 4, 6.0, 6.0)]
    assert (list(curve.lows.values), list(curve.highs.values)) == ([1.0, 2.0, 5.0, 6.0], [1.0, 4.0, 5.0, 6.0])
    assert curve.counts == [1, 2, 1, 2]


def test_a_step_without_any_number_is_a_gap_and_no_runs_have_no_mean() -> None:
    curve = mean_curve([(points((1, 1.0, math.nan)), 0.0), (points((1, 1.0, math.nan)), 0.0)])
    assert [math.isnan(value) for value in (*curve.means.values, *curve.lows.values)] == [True, True]
    assert len(mean_curve([]).means) == 0
