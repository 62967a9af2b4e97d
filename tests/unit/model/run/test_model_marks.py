"""What people note on a run, and what it trains with, from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.journal_events import event, read_run

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.run import Run
from slurmtrain.ops.marks import tag_problem


def journaled(*facts: tuple[str, dict[str, Any]]) -> list[AnyEvent]:
    """Events of a command's journal, a second apart."""
    return [event(10.0 + at, kind, record, "journal/a.jsonl", at) for at, (kind, record) in enumerate(facts)]


def folded(*facts: tuple[str, dict[str, Any]]) -> Run:
    return read_run("RUN", journaled(*facts), {})


def test_the_newest_word_on_each_tag_the_note_and_the_archive_counts() -> None:
    run = folded(("tags", {"add": ["b", "a"]}), ("tags", {"remove": ["b"], "add": ["c"]}), ("tags", {"add": ["b"]}))
    assert run.tags == ["a", "b", "c"]
    noted = folded(("note", {"text": "a"}), ("note", {"text": "b"}), ("archived", {}))
    assert (noted.note, noted.archived) == ("b", True)
    undone = folded(
        ("note", {"text": "a"}), ("note", {"text": ""}), ("archived", {}), ("archived", {"archived": False})
    )
    assert (undone.note, undone.archived) == ("", False)


def test_a_deletion_is_complete_once_the_space_that_it_freed_is_known() -> None:
    requested = folded(("delete", {"bytes": 5}))
    assert (requested.deleted_at, requested.freed) == (10.0, None)
    complete = folded(("delete", {"bytes": 5}), ("deleted", {}))
    assert (complete.deleted_at, complete.freed) == (10.0, 5)


@pytest.mark.parametrize("tag", ["", "a b", "-a", "@last", "a,b", "cnn*", "a\n", "x" * 65, "a=b"])
def test_what_a_shell_or_a_condition_would_not_take_as_a_word_cannot_be_a_tag(tag: str) -> None:
    assert tag_problem(tag)


def submission(number: int, **settings: Any) -> list[tuple[str, dict[str, Any]]]:
    job = f"j{number}"
    return [
        ("submitting", {"submission": number, "attempt": number, "job_id": job, **settings}),
        ("submitted", {"submission": number, "job_id": job}),
    ]


CREATED = ("created", {"params": {"lr": 1}, "command": "a", "resources": {"nodes": 1}, "sweep": "s"})
RESTATED = {"params": {"lr": 2}, "command": "b", "resources": {"nodes": 2}}


@pytest.mark.parametrize(
    ("submissions", "settings"),
    [
        ([submission(1)], ({"lr": 1}, "a", {"nodes": 1})),
        ([submission(1), submission(2, **RESTATED)], ({"lr": 2}, "b", {"nodes": 2})),
        ([submission(1), submission(2, **RESTATED), submission(3)], ({"lr": 2}, "b", {"nodes": 2})),
        ([submission(1), [*submission(2, **RESTATED), ("unstarted", {"submission": 2, "job_id": "j2"})]],
         ({"lr": 1}, "a", {"nodes": 1})),
    ],
)  # fmt: skip
def test_params_command_and_resources_are_those_of_the_newest_attempt(
    submissions: Sequence[list[tuple[str, dict[str, Any]]]], settings: object
) -> None:
    run = folded(CREATED, *(fact for each in submissions for fact in each))
    assert (run.params, run.command, run.resources) == settings
    assert run.sweep == "s"
