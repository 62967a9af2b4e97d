"""Which runs a question is about, and in which order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.workspaces import make_workspace

from slurmtrain.errors import QueryError, RunNotFound
from slurmtrain.ops import colleagues
from slurmtrain.ops.query.select import Question, Selection, select_runs
from slurmtrain.ops.shared import views
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A sweep of six, a failed run on another node, a tagged one, and an archived one."""
    workspace = make_workspace(tmp_path_factory.mktemp("select") / "runs")
    write_sweep(workspace)
    write_run(workspace, 7, "gpt", state="failed", host="n7", params={"layers": 12}, days_ago=30)
    write_run(workspace, 8, "gpt", tags=["good", "paper"], params={"layers": 24}, metrics={"loss": 0.05})
    write_run(workspace, 9, "old", archived=True)
    return workspace


def answer(workspace: Workspace, **question: Any) -> Selection:
    return select_runs(workspace, observe(workspace, ask_slurm=False).runs, Question(**question))


def numbers(workspace: Workspace, **question: Any) -> list[int]:
    return [int(run["id"]) for run in answer(workspace, **question).runs]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ({}, [6, 8, 7, 5, 4, 3, 2, 1]),
        ({"where": ["params.lr <= 0.1 and state = completed"]}, [4, 3, 2, 1]),
        ({"where": ["params.lr <= 0.1", "params.seed = 1"]}, [4, 2]),
        ({"states": ["running", "failed"]}, [6, 7]),
        ({"causes": ["oom"]}, [7]),
        ({"since": "2w", "where": ["name = gpt"]}, [8]),
        ({"tags": ["good", "paper"]}, [8]),
        ({"tags": ["good", "bad"]}, []),
        ({"sweep": SWEEP, "where": ["params.seed = 0"]}, [5, 3, 1]),
        ({"node": "n7"}, [7]),
        ({"node": "n*", "states": ["running"]}, [6]),
        ({"sort": "-metrics.acc", "limit": 3}, [4, 3, 6]),
        ({"sort": "metrics.acc,-id"}, [1, 2, 5, 6, 3, 4, 8, 7]),
        ({"names": ["cnn*"], "where": ["metrics.acc > 0.7"]}, [6, 4, 3]),
        ({"names": [SWEEP], "limit": 2}, [6, 5]),
        ({"names": ["gpt"]}, [8]),
        ({"names": ["gpt"], "namesakes": True}, [8, 7]),
    ],
)
def test_conditions_names_and_order_combine(
    workspace: Workspace, question: dict[str, Any], expected: list[int]
) -> None:
    assert numbers(workspace, **question) == expected


@pytest.mark.parametrize(
    "question", [{"all_runs": True}, {"names": ["old"]}, {"names": ["ol*"]}, {"where": ["archived = true"]}]
)
def test_archived_runs_are_listed_only_if_they_are_named_or_asked_for(
    workspace: Workspace, question: dict[str, Any]
) -> None:
    assert 9 in numbers(workspace, **question)
    assert 9 not in numbers(workspace, names=["*"])
    assert 9 not in numbers(workspace, sort="id")


def test_other_programs_get_the_oldest_first_unless_they_sort(workspace: Workspace) -> None:
    assert numbers(workspace, for_programs=True) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert numbers(workspace, for_programs=True, limit=2) == [6, 8]
    assert numbers(workspace, for_programs=True, names=["gpt", "0000000002"]) == [8, 2]
    assert numbers(workspace, for_programs=True, sort="-params.lr,id", limit=2) == [5, 6]


def test_runs_beyond_the_limit_are_counted_and_fields_of_interest_are_named(workspace: Workspace) -> None:
    selection = answer(workspace, where=["metrics.loss < 5 and name = cnn"], sort="-metrics.acc", limit=4)
    assert sorted(selection.cut) == ["completed", "completed"]
    assert selection.fields == ["metrics.acc", "metrics.loss"]
    assert selection.total == 9


def test_without_a_question_only_the_newest_of_many_runs_are_listed(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in range(1, 26):
        write_run(workspace, number, state="created" if number == 2 else "completed")
    assert numbers(workspace) == [2, *range(25, 5, -1)]
    assert len(numbers(workspace, states=["completed"])) == 24


def test_runs_of_others_in_a_shared_root_answer_too(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"id": "0000000010", "user": "bob", "state": "running", "name": "vit", "params": {"lr": 0.2}}
    monkeypatch.setattr(colleagues, "runs_of_colleagues", lambda _: ([theirs], ["a run of eve cannot be read"]))
    shared = Workspace(replace(workspace.config, shared_root=workspace.root.path.parent))
    selection = answer(shared, all_runs=True, where=["params.lr >= 0.1"], sort="-params.lr,id")
    assert [int(run["id"]) for run in selection.runs] == [5, 6, 10, 3, 4]
    assert selection.notes == ["a run of eve cannot be read"]
    assert numbers(shared, all_runs=True, where=["user = bob"]) == [10]
    assert 10 not in numbers(shared, sort="id")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"where": ["params.lrr < 1"]}, "did you mean 'params.lr'"),
        ({"sort": "acc"}, "did you mean 'metrics.acc'"),
        ({"columns": ["idd"]}, "did you mean 'id'"),
        ({"states": ["done"]}, "there is no state 'done'"),
        ({"causes": ["ooom"]}, "did you mean 'oom'"),
        ({"since": "lately"}, "'lately' is not a time"),
    ],
)
def test_a_question_that_means_nothing_is_refused(workspace: Workspace, question: dict[str, Any], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        answer(workspace, **question)


def test_a_name_that_no_run_has_is_refused(workspace: Workspace) -> None:
    with pytest.raises(RunNotFound):
        answer(workspace, names=["rnn*"], where=["state = failed"])


def test_files_are_read_only_of_runs_that_are_shown(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(views.RunRecord, "rate", property(lambda run: read.append(run.directory.id)))
    selection = answer(workspace, where=["params.lr < 5"], sort="-metrics.acc")
    assert read == []
    assert [run["steps_per_second"] for run in selection.runs] == [None] * 6
    assert read == [run["id"] for run in selection.runs]
