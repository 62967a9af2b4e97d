"""Tags, notes and archiving, as typed, and what remains of them when the registry is rebuilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.status_commands import show_command, status_command
from slurmtrain.cli.upkeep_commands import archive_command, note_command, tag_command
from slurmtrain.errors import RunNotFound, RunUnreadable, UserError
from slurmtrain.ops.shared.observe import rebuild
from slurmtrain.ops.shared.workspace import Workspace

A, B, LIVE = "0000000001", "0000000002", "0000000003"
SWEEP = "0000000000"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Two runs of a sweep, which have ended, and a run that trains elsewhere."""
    workspace = make_workspace(tmp_path / "runs")
    for run_id, name in {A: "cnn", B: "cnn", LIVE: "mlp"}.items():
        sim = SimulatedRun(workspace.root.run(run_id), spec={"name": name}, executor="local")
        sim.created(name=name, sweep=None if run_id == LIVE else SWEEP).submitted().started()
        if run_id != LIVE:
            sim.ended("completed")
    return workspace


def call(workspace: Workspace, command: Any, *arguments: str) -> Result:
    words = [*arguments, "--runs", str(workspace.root.path)]
    return CliRunner().invoke(command, words, standalone_mode=False)


def marks(workspace: Workspace) -> dict[str, tuple[Any, ...]]:
    runs = json.loads(call(workspace, status_command, "--json", "--all").stdout)["runs"]
    return {run["id"]: (run["tags"], run["note"], run["archived"]) for run in runs}


def test_the_tag_comes_after_any_number_of_runs_and_a_run_alone_prints_its_tags(workspace: Workspace) -> None:
    call(workspace, tag_command, A, LIVE, "good")
    call(workspace, tag_command, SWEEP, "quick")
    assert {run_id: tags for run_id, (tags, *_) in marks(workspace).items()} == {
        A: ["good", "quick"], B: ["quick"], LIVE: ["good"],
    }  # fmt: skip
    assert call(workspace, tag_command, A).stdout == "good\nquick\n"
    result = call(workspace, tag_command, "cnn*", "quick", "--remove", "--json")
    assert [run["tags"] for run in json.loads(result.stdout)["runs"]] == [["good"], []]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((A, B), f"'{B}' is a run; the tag comes after the runs"),
        ((A, "@last"), "is a run; the tag comes after"),
        ((A, "a b"), "'a b' cannot be a tag: a tag is a word"),
        ((A, "goood", "--remove"), "has the tag 'goood', did you mean 'good'|has the tag 'goood'.*'good'"),
    ],
)
def test_a_word_that_is_no_tag_of_these_runs_is_refused(
    workspace: Workspace, words: tuple[str, ...], message: str
) -> None:
    call(workspace, tag_command, A, "good")
    before = marks(workspace)
    error = call(workspace, tag_command, *words).exception
    assert isinstance(error, UserError)
    with pytest.raises(UserError, match=message):
        raise error
    assert marks(workspace) == before


def test_a_mark_that_a_run_has_already_is_not_journaled_again(workspace: Workspace) -> None:
    for _ in range(2):
        call(workspace, tag_command, A, "good")
        call(workspace, note_command, A, "fine")
        call(workspace, archive_command, A)
    journals = sorted(path.name.split("-")[0] for path in workspace.root.run(A).journals.glob("*-*.jsonl"))
    assert [name for name in journals if name in ("tag", "note", "archive")] == ["archive", "note", "tag"]


def test_a_note_is_written_printed_replaced_and_removed(workspace: Workspace) -> None:
    assert "wrote the note" in call(workspace, note_command, A, "diverged", "at", "step 900").stderr
    assert call(workspace, note_command, A).stdout == "diverged at step 900\n"
    assert "diverged at step 900" in call(workspace, show_command, A).stdout
    call(workspace, note_command, A, "fine")
    assert call(workspace, note_command, A).stdout == "fine\n"
    assert "removed the note" in call(workspace, note_command, A, "").stderr
    assert call(workspace, note_command, A).stdout == ""


def test_an_archived_run_is_listed_where_it_is_named_or_all_are(workspace: Workspace) -> None:
    call(workspace, archive_command, A, LIVE)

    def listed(*arguments: str) -> set[str]:
        return {
            line.split()[0] for line in call(workspace, status_command, "--no-fold", *arguments).stdout.splitlines()[1:]
        }

    # One that goes on is listed all the same.
    assert listed() == {B, LIVE}
    assert listed("--all") == {A, B, LIVE}
    assert listed(A) == {A}
    call(workspace, archive_command, A, "--undo")
    assert listed() == {A, B, LIVE}


def test_a_rebuilt_registry_has_the_same_marks(workspace: Workspace) -> None:
    call(workspace, tag_command, "cnn*", "good")
    call(workspace, tag_command, B, "good", "--remove")
    call(workspace, note_command, LIVE, "watch this one")
    call(workspace, archive_command, A)
    before = marks(workspace)
    rebuild(Workspace(workspace.config))
    assert (
        marks(workspace) == before == {A: (["good"], "", True), B: ([], "", False), LIVE: ([], "watch this one", False)}
    )


def test_nothing_is_changed_where_a_run_is_unknown_or_cannot_be_read(workspace: Workspace) -> None:
    assert isinstance(call(workspace, tag_command, A, "nobody", "good").exception, RunNotFound)
    [journal, *_] = workspace.root.run(B).journals.glob("*.jsonl")
    journal.unlink()
    journal.mkdir()
    assert isinstance(call(workspace, archive_command, A, B).exception, RunUnreadable)
    assert marks(workspace)[A] == ([], "", False)
