"""Summaries of surviving lines, made at once and in pieces."""

from __future__ import annotations

import json

from helpers.metric_lines import Lines, lines
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import MetricSummary, block_of
from slurmtrain.model.metrics.curves import AttemptLines, AttemptStart, LineSummary, SurvivingLine, curves_of, extend
from slurmtrain.model.run.journal_lines import Point

A, B = AttemptStart(1, 0), AttemptStart(2, 3)


def points(*steps: int, name: str = "loss") -> list[Point]:
    return [Point(step, 1000.0 + step, {name: step / 10}) for step in steps]


def at_once(story: Lines) -> LineSummary:
    summary = extend(
        LineSummary(), [AttemptLines(str(s.number), s, 0, len(p), [block_of(p)]) for s, p in story.attempts]
    )
    assert summary is not None
    return summary


class Reader:
    """Reads lines bit by bit, as commands do, and makes the summary anew where it cannot be continued."""

    def __init__(self) -> None:
        self.summary = LineSummary()
        self.read: dict[str, int] = {}
        self.made_anew = 0

    def look(self, visible: Lines) -> None:
        attempts = []
        for start, logged in visible.attempts:
            key = str(start.number)
            begin = self.read.get(key, 0)
            attempts.append(AttemptLines(key, start, begin, len(logged), [block_of(logged[begin:])]))
            self.read[key] = len(logged)
        extended = extend(self.summary, attempts)
        if extended is None:
            self.made_anew += 1
            extended = at_once(visible)
        stored = json.loads(json.dumps(extended.to_json()))
        self.summary = LineSummary.from_json(stored, extended.metrics)
        assert self.summary == extended


@given(lines())
def test_curves_and_summaries_are_those_of_a_walk_point_by_point(story: Lines) -> None:
    line = SurvivingLine()
    for start, logged in story.attempts:
        line.add_attempt(start, [block_of(logged[:3]), block_of([]), block_of(logged[3:])])
    kept, superseded = story.survivors()
    curves = curves_of(line, keep_superseded=True)
    assert {name: text(curve.kept.rows()) for name, curve in curves.items()} == {n: text(r) for n, r in kept.items()}
    for name, curve in curves.items():
        assert sorted(text(curve.superseded.rows())) == sorted(text(superseded.get(name, [])))
    assert at_once(story).metrics == story.summaries()


def text(rows: object) -> list[str]:
    return [repr(row) for row in rows]  # type: ignore[attr-defined]


@given(lines(), st.data())
def test_any_order_of_appearance_gives_the_summary_of_all_lines_at_once(story: Lines, data: st.DataObject) -> None:
    reader, visible = Reader(), [0] * len(story.attempts)
    for _ in range(data.draw(st.integers(0, 5))):
        shown = Lines()
        for index, (start, logged) in enumerate(story.attempts[: data.draw(st.integers(0, len(story.attempts)))]):
            visible[index] = data.draw(st.integers(visible[index], len(logged)))
            begin = start if data.draw(st.booleans()) else AttemptStart(start.number)
            shown.attempts.append((begin, logged[: visible[index]]))
        if len(shown.attempts) >= len(reader.summary.attempts):
            reader.look(shown)
    reader.look(story)
    assert reader.summary.metrics == story.summaries()


def test_appended_lines_and_attempts_that_go_on_without_a_rollback_need_no_second_reading() -> None:
    reader = Reader()
    reader.look(Lines([(A, points(1, 2))]))
    reader.look(Lines([(A, points(1, 2, 3)), (AttemptStart(2), [])]))
    reader.look(Lines([(A, points(1, 2, 3)), (B, [])]))
    reader.look(Lines([(A, points(1, 2, 3)), (B, points(4, 5))]))
    assert reader.made_anew == 0
    assert reader.summary.metrics == {"loss": MetricSummary(5, 5, 0.5, 0.1, 1, 0.5, 5)}


def test_a_rollback_behind_what_was_read_before_takes_values_out_of_the_summary() -> None:
    reader = Reader()
    reader.look(Lines([(A, points(1, 2, 3, 4, 5))]))
    reader.look(Lines([(A, points(1, 2, 3, 4, 5)), (B, [])]))
    assert reader.made_anew == 1
    assert reader.summary.metrics == {"loss": MetricSummary(3, 3, 0.3, 0.1, 1, 0.3, 3)}
