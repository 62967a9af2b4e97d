"""What a watch reports of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.journal_lines import Garbage
from slurmtrain.ops.shared.observe import ListedRuns, Observed
from slurmtrain.ops.sync import Synced
from slurmtrain.ops.watch.report import ReportFilter, WatchEvent
from slurmtrain.ops.watch.rounds import WatchRound
from slurmtrain.registry.queries import IndexRow
from slurmtrain.registry.rows import Listed

if TYPE_CHECKING:
    from slurmtrain.registry.store import Store


def kinds(events: Sequence[WatchEvent]) -> list[str]:
    return [event.kind for event in events]


def messages(events: Sequence[WatchEvent]) -> list[str]:
    return [event.message for event in events]


def outcome(
    state: str = "running", *, attempt: int = 1, reason: str = "", down: bool = False, **synced: Any
) -> WatchRound:
    """A round after which the run r1 is in this state; ``synced``: what else the round did."""
    listed = Listed({"name": "x", "state": state, "attempt": attempt, "reason": reason})
    index = {"r1": IndexRow("r1", "x", state, settled=False, journals_at=0, attempts_at=0)}
    store = cast("Store", SimpleNamespace(index=lambda: index, listed=lambda _: {"r1": listed}))
    observed = Observed(ListedRuns(store), problems=synced.pop("unasked", ()))
    return WatchRound(Synced(observed, **synced), slurm_down=down)


def test_what_a_round_did_is_a_line_for_each_run() -> None:
    report = ReportFilter()
    assert messages(report.new_events(outcome("pending", attempt=2, started=["r1"]), 0.0)) == [
        "run r1 (x) was started again, as attempt 2"
    ]
    assert messages(report.new_events(outcome("pending", released=["r1"]), 0.0)) == [
        "run r1 (x) was held; its job was released"
    ]
    [ended] = report.new_events(outcome("failed", reason="rank 1 exited with code 1"), 0.0)
    assert (ended.message, ended.state) == ("run r1 (x) has failed: rank 1 exited with code 1", "failed")


@pytest.mark.parametrize("kind", ["mirrored", "cancelled"])
def test_what_happens_in_every_round_of_a_run_is_reported_at_its_first_and_at_its_end(kind: str) -> None:
    report = ReportFilter()
    events = [kinds(report.new_events(outcome("running", **{kind: ["r1"]}), 0.0)) for _ in range(3)]
    assert events == [[kind], [], []]
    assert set(kinds(report.new_events(outcome("completed", **{kind: ["r1"]}), 0.0))) == {"finished", kind}
    assert report.new_events(outcome("completed"), 0.0) == []


def test_a_note_and_unreadable_lines_are_reported_while_they_are_new() -> None:
    report = ReportFilter()
    bad = Garbage("journal/submit.jsonl", 3, b"x")
    with_garbage = outcome(notes=["n1 is left out"])
    with_garbage.synced.observed = replace(with_garbage.synced.observed, garbage=[("r1", bad), ("r1", bad)])
    assert messages(report.new_events(with_garbage, 0.0)) == [
        "n1 is left out",
        "run r1: 2 unreadable line(s) in journal/submit.jsonl",
    ]
    assert report.new_events(outcome(notes=["n1 is left out"]), 0.0) == []
    assert report.new_events(outcome(), 0.0) == []


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sampled_from(["complete", "down", "failed"])), max_size=12)
)
def test_each_problem_is_reported_once_until_it_is_over_and_over_only_after_a_complete_round(
    rounds: list[tuple[set[str], str]],
) -> None:
    report, lasting = ReportFilter(), set()
    for problems, kind in rounds:
        if kind == "failed":
            events = report.new_events(WatchRound(failure="z"), 0.0)
            problems = {"z"}
        else:
            events = report.new_events(outcome(problems=sorted(problems), down=kind == "down"), 0.0)
        assert {event.message for event in events if event.kind == "problem"} == problems - lasting
        over = lasting - problems if kind == "complete" else set()
        assert {event.message for event in events if event.kind == "over"} == {f"no longer so: {text}" for text in over}
        lasting = (lasting | problems) - over
