"""Looking at more runs than each command looks into: what is noticed at once, and what later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.fakeslurm import FakeScheduler

from slurmtrain.config import Config
from slurmtrain.errors import RunNotFound
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir, run_id
from slurmtrain.ops.query.compare import rank
from slurmtrain.ops.query.select import NEWEST, Question, select_runs
from slurmtrain.ops.shared import observe as observe_module
from slurmtrain.ops.shared.find import choose_all, choose_one
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.process import this_process

RUNS = 30
LONG_AGO_NS = 10**18


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Already thirty runs are many."""
    monkeypatch.setattr(observe_module, "_FEW", 5)
    monkeypatch.setattr("slurmtrain.ops.query.compare._RANKED", 5)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Runs that have ended and settled, and that a command has looked at."""
    runs = tmp_path / "runs"
    config = Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None)
    workspace = Workspace(config, scheduler=FakeScheduler())
    for number in range(RUNS):
        add(workspace, number)
    observe(workspace)
    assert all(row.settled for row in observe(workspace).runs.index.values())
    return workspace


def id_of(number: int) -> str:
    return run_id(1_700_000_000_000 + number, number)


def add(workspace: Workspace, number: int, cause: str = "completed") -> RunDir:
    run = workspace.root.run(id_of(number))
    process = {**this_process().to_dict(), "start": 1}
    for folder in (run.journals, run.attempt("j", 0).path):
        folder.mkdir(parents=True)
    submitting = {"submission": 1, "job_id": "j", "attempt": 1, "executor": "local", "host": process["host"]}
    lines = [
        encode(1.0, "created", {"name": f"run-{number}", "executor": "local", "params": {"lr": number / 100}}),
        encode(2.0, "submitting", submitting),
        encode(3.0, "submitted", {"submission": 1, "job_id": "j", "process": process}),
    ]
    (run.journals / "submit.jsonl").write_bytes(b"".join(lines))
    agent = {"node": 0, "nodes": 1, "host": "n0", "process": process, "submission": 1, "attempt": 1}
    end = {"cause": cause, "reason": "", "failed_at": None, "failures": []}
    ended = encode(4.0, "agent", agent) + encode(100.0 + number, "end", end)
    run.attempt("j", 0).node_journal(0).write_bytes(ended)
    run.attempt("j", 0).metrics.write_text('{"t": 5, "step": 1, "metrics": {"loss": %s}}\n' % (abs(number - 17) + 0.5))
    for folder in (run.journals, run.attempts):
        os.utime(folder, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return run


def tag(workspace: Workspace, number: int) -> None:
    """Tag a run as another machine does, whose registry is another one."""
    journal = workspace.root.run(id_of(number)).journals / "tag-elsewhere.jsonl"
    journal.write_bytes(encode(200.0, "tags", {"add": ["seen"], "remove": [], "by": "me@there"}))


def tags(observed: Observed, number: int) -> list[str]:
    return observed.runs[id_of(number)].tags


def test_a_change_in_one_of_the_runs_that_ended_last_is_noticed_at_once(workspace: Workspace) -> None:
    tag(workspace, RUNS - 1)
    assert tags(observe(workspace), RUNS - 1) == ["seen"]


def test_a_change_in_an_older_run_is_noticed_once_all_are_looked_at_again(workspace: Workspace) -> None:
    tag(workspace, 0)
    assert tags(observe(workspace), 0) == []
    mark = workspace.root.settled_check
    os.utime(mark, (mark.stat().st_mtime - 700, mark.stat().st_mtime - 700))
    assert tags(observe(workspace), 0) == ["seen"]
    assert mark.stat().st_mode & 0o777 == 0o600


def test_a_thorough_look_and_one_at_the_run_notice_a_change_in_an_older_run(workspace: Workspace) -> None:
    tag(workspace, 0)
    tag(workspace, 1)
    assert tags(observe(workspace, [id_of(0)]), 0) == ["seen"]
    assert tags(observe(workspace, thorough=True), 1) == ["seen"]


def test_runs_that_come_and_go_are_noticed_at_once(workspace: Workspace) -> None:
    add(workspace, RUNS, "failed")
    shutil.rmtree(workspace.root.run(id_of(3)).path)
    runs = observe(workspace).runs
    assert len(runs) == RUNS
    assert id_of(3) not in runs
    assert runs[id_of(RUNS)].state == "failed"
    assert list(runs) == sorted({id_of(number) for number in range(RUNS + 1)} - {id_of(3)})


def test_a_list_of_the_newest_does_not_read_all_runs(workspace: Workspace) -> None:
    runs = observe(workspace).runs
    selection = select_runs(workspace, runs, Question())
    assert [run["id"] for run in selection.runs] == [id_of(number) for number in range(RUNS - 1, RUNS - 1 - NEWEST, -1)]
    assert selection.total == RUNS
    assert "index" not in vars(runs)


@pytest.mark.parametrize("name", ["@last", id_of(4), id_of(4)[:9] + id_of(4)[9:].upper(), "run-4"])
def test_a_run_is_found_by_its_names_without_reading_all(workspace: Workspace, name: str) -> None:
    runs = observe(workspace).runs
    assert choose_one(workspace, runs, name) == (id_of(RUNS - 1) if name == "@last" else id_of(4))
    assert choose_all(workspace, runs, [name]) == [choose_one(workspace, runs, name)]
    assert "index" not in vars(runs)


def test_a_name_that_no_run_has_gets_the_nearest_one_suggested(workspace: Workspace) -> None:
    with pytest.raises(RunNotFound, match=r"no run 'ran-4'; did you mean 'run-4'\?"):
        choose_one(workspace, observe(workspace).runs, "ran-4")


def test_a_pattern_means_runs_of_any_age(workspace: Workspace) -> None:
    assert choose_all(workspace, observe(workspace).runs, ["run-?"]) == [id_of(number) for number in range(10)]


@pytest.mark.parametrize("larger", [None, True])
def test_the_best_of_many_runs_are_those_that_reading_all_of_them_gives(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, larger: bool | None
) -> None:
    question = Question(for_programs=True)
    few = rank(workspace, observe(workspace).runs, question, "loss", larger)
    monkeypatch.setattr("slurmtrain.ops.query.compare._RANKED", RUNS)
    whole = rank(workspace, observe(workspace).runs, question, "loss", larger)
    assert [run["id"] for run in few.runs] == [run["id"] for run in whole.runs][:5]
    assert (few.criterion, few.without, few.params) == (whole.criterion, 0, ["lr"])
