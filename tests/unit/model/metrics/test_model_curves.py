"""Curves of a run's metrics over its attempts, their means, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import block_of
from slurmtrain.model.metrics.curves import AttemptStart, Curve, Points, Restart, SurvivingLine, curves_of, mean_curve
from slurmtrain.model.run.journal_lines import Point


@dataclass
class Round:
    """Ranks resume from ``back`` steps before the newest one, and train ``steps``, in a new attempt or the same one."""

    back: int
    steps: int
    new_attempt: bool


rounds = st.builds(Round, back=st.integers(0, 12), steps=st.integers(0, 15), new_attempt=st.booleans())


@dataclass
class Story:
    """The lines that rounds write, and what an unbroken training would have logged: a value by step and metric."""

    attempts: list[tuple[AttemptStart, list[Point]]] = field(default_factory=list)
    kept: dict[str, dict[int, float]] = field(default_factory=lambda: {"loss": {}, "val": {}})

    @classmethod
    def play(cls, played: list[Round], validated_every: int, *, resumes_known: bool) -> Story:
        story, step, now = cls(), 0, 1000.0
        for number, each in enumerate(played):
            step = max(0, step - each.back)
            for values in story.kept.values():
                for later in [at for at in values if at > step]:
                    del values[later]
            now += 1
            if each.new_attempt or not story.attempts:
                story.attempts.append((AttemptStart(len(story.attempts) + 1, step if resumes_known else None), []))
            else:
                start, points = story.attempts[-1]
                # As in an attempt: the steps that all but the last restart resumed from are not known.
                before = [Restart(restart.at, None) for restart in start.restarts]
                restarts = [*before, Restart(now, step if resumes_known else None)]
                story.attempts[-1] = (AttemptStart(start.number, start.step, restarts), points)
            for _ in range(each.steps):
                step, now = step + 1, now + 1
                metrics = {"loss": number + step / 100}
                if step % validated_every == 0:
                    metrics["val"] = number * 2 + step / 100
                story.attempts[-1][1].append(Point(step, now, metrics))
                for name, value in metrics.items():
                    story.kept[name][step] = value
        return story


def build(
    attempts: Sequence[tuple[AttemptStart, Sequence[Point]]], *names: str, keep_superseded: bool = False
) -> dict[str, Curve]:
    line = SurvivingLine()
    for start, points in attempts:
        line.add_attempt(start, [block_of(points)])
    return curves_of(line, names or None, keep_superseded=keep_superseded)


def as_dict(curves: dict[str, Curve], name: str) -> dict[int, float]:
    kept = curves[name].kept if name in curves else Curve().kept
    assert list(kept.steps) == sorted(set(kept.steps))
    return dict(zip(kept.steps, kept.values, strict=True))


@given(st.lists(rounds, max_size=12), st.integers(1, 7))
def test_each_step_survives_once_as_in_a_training_without_interruptions(played: list[Round], every: int) -> None:
    story = Story.play(played, every, resumes_known=True)
    curves = build(story.attempts)
    # Step 0 may also mean that ranks have yet to restore their checkpoint: it counts once they train.
    if not _ends_untrained_at_0(played):
        assert {name: as_dict(curves, name) for name in story.kept} == story.kept


def _ends_untrained_at_0(played: list[Round]) -> bool:
    """Whether the last round began at the beginning, and trained no step."""
    step = 0
    for each in played:
        step = max(0, step - each.back) + each.steps
    return step == 0


@given(st.lists(rounds.filter(lambda each: each.steps > 0), max_size=12))
def test_where_ranks_resumed_also_follows_from_the_first_step_that_they_log(played: list[Round]) -> None:
    story = Story.play(played, 1, resumes_known=False)
    assert as_dict(build(story.attempts), "loss") == story.kept["loss"]


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
