"""A run over time: rows of nodes, goodput so far, and what a drawing can show."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.accounting import KINDS, Interval, goodput
from slurmtrain.model.run.run import Attempt
from slurmtrain.model.run.timeline import Presence, goodput_over_time, legible, rows_of_nodes


def attempt(number: int, *hosts: str, restarts: tuple[dict[str, Any], ...] = (), **more: Any) -> Attempt:
    by_node = {str(node): host for node, host in enumerate(hosts)}
    return Attempt(number=number, job_id="7", restart=number - 1, hosts=by_node, restarts=restarts, **more)


def line(*parts: tuple[str, float], begin: float = 0.0) -> list[Interval]:
    intervals = []
    for kind, seconds in parts:
        intervals.append(Interval(kind, begin, begin + seconds))
        begin += seconds
    return intervals


FIRST = line(("queue", 5), ("start", 2), ("train", 10), ("lost", 3))
SECOND = line(("queue", 5), ("start", 1), ("train", 14), begin=20)


def test_each_node_has_a_row_with_the_attempts_that_it_took_part_in() -> None:
    attempts = [attempt(1, "n2", "n10"), attempt(2, "n2", "n3")]
    rows = rows_of_nodes(attempts, {"7.0": FIRST, "7.1": SECOND}, 24)
    assert [(row.label, row.presences) for row in rows] == [
        ("n2", [Presence(1, 5, 20), Presence(2, 25, 40)]),
        ("n3", [Presence(2, 25, 40)]),
        ("n10", [Presence(1, 5, 20)]),
    ]


def test_nodes_of_many_that_took_part_together_share_a_row_and_the_last_row_has_all_others() -> None:
    names = [f"n{number}" for number in range(100)]
    lines = {"7.0": FIRST, "7.1": SECOND}
    rows = rows_of_nodes([attempt(1, *names), attempt(2, *names[:98], "m0", "m1")], lines, 24)
    assert [(row.label, len(row.hosts), len(row.presences)) for row in rows] == [
        ("m[0-1]", 2, 1), ("n[0-97]", 98, 2), ("n[98-99]", 2, 1),
    ]  # fmt: skip
    assert [row.label for row in rows_of_nodes([attempt(1, *names)], lines, 1)] == ["n[0-99]"]
    few = rows_of_nodes([attempt(1, *names), attempt(2, *names[:98], "m0", "m1")], lines, 2)
    assert [(row.label, row.presences) for row in few][1] == (
        "100 more nodes",
        [Presence(1, 5, 20), Presence(2, 25, 40)],
    )


def test_nodes_that_join_or_leave_are_there_for_that_time_alone() -> None:
    restarts = ({"at": 10.0, "joined": [1, 2]}, {"at": 15.0, "lost": [0, 2]})
    rows = rows_of_nodes([attempt(1, "a", "b", "c", restarts=restarts)], {"7.0": FIRST}, 24)
    assert {row.label: row.presences for row in rows} == {
        # Of the job itself: it keeps the node until its end.
        "a": [Presence(1, 5, 20)], "b": [Presence(1, 10, 20)], "c": [Presence(1, 10, 15)],
    }  # fmt: skip


def test_nodes_of_one_machine_are_told_apart_and_an_attempt_that_only_waited_has_none() -> None:
    rows = rows_of_nodes(
        [attempt(1, "here", "here"), attempt(2, "here")], {"7.0": FIRST, "7.1": line(("queue", 9.0))}, 24
    )
    assert [row.label for row in rows] == ["here (node 0)", "here (node 1)"]


INTERVALS = st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.001, 1000)), max_size=20)


@given(st.lists(st.tuples(st.integers(1, 5), INTERVALS), min_size=1, max_size=4))
def test_the_last_goodput_so_far_is_that_of_the_run(parts: list[tuple[int, list[tuple[str, float]]]]) -> None:
    attempts, lines, begin = [], {}, 0.0
    for number, (nodes, intervals) in enumerate(parts, 1):
        lines[f"7.{number - 1}"] = line(*intervals, begin=begin)
        spent = dict.fromkeys(KINDS, 0.0)
        for kind, seconds in intervals:
            spent[kind] += seconds
        attempts.append(attempt(number, *map(str, range(nodes)), spent=spent))
        begin += sum(seconds for _, seconds in intervals)
    points, whole = goodput_over_time(attempts, lines), goodput(attempts)
    assert [at for at, _ in points] == sorted(at for at, _ in points)
    assert all(0 <= share <= 1 + 1e-9 for _, share in points)
    assert (points[-1][1] if points else None) == (whole if whole is None else pytest.approx(whole))


@given(INTERVALS, st.floats(0, 100))
def test_what_is_drawn_covers_the_same_time_in_few_intervals(parts: list[tuple[str, float]], shortest: float) -> None:
    whole = line(*parts)
    drawn = legible(whole, shortest)
    assert (drawn[0].begin, drawn[-1].end) == (whole[0].begin, whole[-1].end) if whole else not drawn
    assert all(before.end == after.begin for before, after in pairwise(drawn))
    total = sum(seconds for _, seconds in parts)
    assert len(drawn) <= (2 * total / shortest + 2 if shortest else len(parts))
    assert {interval.kind for interval in drawn} <= {interval.kind for interval in whole}


def test_of_intervals_too_short_to_be_drawn_the_kind_that_lasts_longest_stands_for_all() -> None:
    saving = [("train", 5.0), ("stall", 0.5)] * 100
    drawn = legible(line(("queue", 1.0), ("start", 9.0), *saving, ("lost", 30.0)), 20.0)
    assert [(kind, round(end - begin, 6)) for kind, begin, end in drawn] == [("train", 560.0), ("lost", 30.0)]
