"""Curves of a run's metrics over its attempts, their means, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurmtrain.model.metrics.columns import block_of
from slurmtrain.model.metrics.curves import AttemptStart, Curve, Points, SurvivingLine, curves_of, mean_curve
from slurmtrain.model.run.journal_lines import Point


def build(
    attempts: Sequence[tuple[AttemptStart, Sequence[Point]]], *names: str, keep_superseded: bool = False
) -> dict[str, Curve]:
    line = SurvivingLine()
    for start, points in attempts:
        line.add_attempt(start, [block_of(points)])
    return curves_of(line, names or None, keep_superseded=keep_superseded)


def test_points_after_the_step_that_a_later_attempt_resumed_from_are_superseded_before_it_logs_any() -> None:
    points = [Point(step, step, {"loss": step}) for step in range(1, 11)]
    curves = build([(AttemptStart(1, 0), points), (AttemptStart(2, 6), [])], keep_superseded=True)
    assert list(curves["loss"].kept.steps) == [1, 2, 3, 4, 5, 6]
    assert list(curves["loss"].superseded.steps) == [7, 8, 9, 10]


def test_an_attempt_that_has_not_restored_its_checkpoint_yet_supersedes_nothing() -> None:
    curves = build([(AttemptStart(1, 0), [Point(1, 1.0, {"loss": 3.0})]), (AttemptStart(2, 0), [])])
    assert list(curves["loss"].kept.steps) == [1]


def test_further_lines_of_a_step_are_no_rollback() -> None:
    points = [Point(1, 1.0, {"loss": 3.0}), Point(1, 2.0, {"val": 4.0}), Point(1, 3.0, {"loss": 2.0})]
    curves = build([(AttemptStart(1, 0), points)])
    assert list(curves["val"].kept.values) == [4.0]
    assert list(curves["loss"].kept.values) == [2.0]


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
