"""Which run is best, and in what runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.workspaces import make_workspace

from slurmtrain.errors import QueryError, UserError
from slurmtrain.ops.query.compare import Answer, Ranking, put_side_by_side, rank
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A sweep of six, and two runs of different code, environments and resources."""
    workspace = make_workspace(tmp_path_factory.mktemp("compare") / "runs")
    write_sweep(workspace)
    write_run(
        workspace, 7, "gpt",
        params={"width": 64}, spec={"command": "python x.py --width ${params.width}", "resources": {"mem": "4GB"}},
        git={"commit": "a" * 40, "dirty": False}, versions={"torch": "2.9.1", "nccl": None},
        history=[{"loss": 0.9}, {"loss": 0.2}, {"loss": 0.4}],
    )  # fmt: skip
    write_run(
        workspace, 8, "gpt",
        params={"width": 128}, spec={"command": "python x.py --width ${params.width}", "checkpoint": {"keep": 5}},
        git={"commit": "b" * 40, "dirty": False}, versions={"torch": "2.10.0", "nccl": None}, history=[{"loss": 0.3}],
    )  # fmt: skip
    return workspace


def ranked(workspace: Workspace, *names: str, by: str | None = "acc", larger: bool | None = None) -> Ranking:
    question = Question(names=names, for_programs=True)
    return rank(workspace, observe(workspace, ask_slurm=False).runs, question, by, larger)


def compared(workspace: Workspace, *names: str, **options: Any) -> Answer:
    question = Question(names=names, for_programs=True)
    return put_side_by_side(workspace, observe(workspace, ask_slurm=False).runs, question, **options)


def test_runs_are_ranked_by_the_newest_value_and_those_without_it_are_counted(workspace: Workspace) -> None:
    ranking = ranked(workspace)
    assert [int(run["id"]) for run in ranking.runs] == [4, 3, 6, 5, 2, 1]
    assert (ranking.params, ranking.without) == (["lr", "seed"], 2)
    assert [int(run["id"]) for run in ranked(workspace, SWEEP, larger=False).runs] == [1, 2, 5, 6, 3, 4]
    assert [int(run["id"]) for run in ranked(workspace, "gpt", by="loss").runs] == [8]


def test_runs_are_judged_by_the_metric_of_the_best_checkpoints_that_their_specs_keep(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    # Of these names none says that larger values are better.
    keep = {"checkpoint": {"keep": {"best": {"metric": "margin", "mode": "max"}}}}
    for number in (1, 2, 3):
        metrics = {"loss": number, "margin": number}
        write_run(workspace, number, params={"lr": number}, metrics=metrics, sweep=SWEEP, spec=keep)
    runs = observe(workspace, ask_slurm=False).runs
    [folded] = select_runs(workspace, runs, Question(folds=True)).lines
    ranking, answer = ranked(workspace, SWEEP, by=None), compared(workspace, SWEEP)
    assert folded["best"] == {"run": "0000000003", "metric": "margin", "value": 3}
    assert (ranking.runs[0]["id"], str(ranking.criterion)) == ("0000000003", "by metrics.margin: larger is better")
    assert (answer.comparison.groups[0].runs[0].id, str(answer.criterion)) == ("0000000003", str(ranking.criterion))
    # What a person says wins; the direction of a metric that a person names is known too.
    assert [ranked(workspace, SWEEP, by=by, larger=larger).runs[0]["id"] for by, larger in (
        ("loss", None), ("margin", None), ("margin", False), (None, False))] == [
        "0000000001", "0000000003", "0000000001", "0000000001"]  # fmt: skip
    # With a run that is for nothing, there is no such metric; nor where none of them has logged it.
    write_run(workspace, 4, "other", metrics={"loss": 0.5, "margin": 9})
    with pytest.raises(QueryError, match="choose a metric with --by"):
        ranked(workspace, by=None)
    write_run(workspace, 5, "only", metrics={"acc": 0.5}, spec=keep)
    assert ranked(workspace, "only", by=None).criterion.name == "metrics.acc"


def test_settings_that_differ_are_named_as_in_the_spec_with_code_and_versions(workspace: Workspace) -> None:
    answer = compared(workspace, "0000000007", "0000000008")
    assert set(answer.comparison.differs) == {
        "params.width", "resources.mem", "checkpoint.keep.last", "git.commit", "versions.torch",
    }  # fmt: skip
    [better, worse] = [run.settings["versions.torch"] for group in answer.comparison.groups for run in group.runs]
    assert (better, worse) == ("2.10.0", "2.9.1")


def test_the_best_value_and_its_step_come_from_the_history(workspace: Workspace) -> None:
    [run] = [run for run in compared(workspace, "gp*").to_json()["runs"] if run["id"] == "0000000007"]
    assert run["metrics"] == {"loss": {"last": 0.4, "best": 0.2, "best_step": 2}}


def test_a_sweep_is_grouped_over_seeds_with_the_best_first(workspace: Workspace) -> None:
    answer = compared(workspace, SWEEP, metrics=["acc"]).to_json()
    json.dumps(answer, allow_nan=False)
    assert (answer["by"], answer["better"]) == ("metrics.acc", "larger")
    assert answer["differs"] == ["params.lr", "params.seed"]
    assert [group["settings"] for group in answer["groups"]] == [{"params.lr": lr} for lr in (0.1, 1.0, 0.01)]
    first = answer["groups"][0]
    assert (first["runs"], first["seeds"]) == (["0000000004", "0000000003"], {"params.seed": [1, 0]})
    assert first["metrics"]["acc"]["last"] == pytest.approx({"mean": 0.905, "deviation": 0.00707}, rel=1e-2)
    assert [run["id"] for run in answer["runs"]][:2] == first["runs"]


def test_the_metric_to_sort_by_is_compared_too(workspace: Workspace) -> None:
    answer = compared(workspace, SWEEP, metrics=["loss"], by="acc", larger=False)
    assert answer.metrics == ["acc", "loss"]
    assert answer.comparison.groups[0].runs[0].settings["params.lr"] == 0.01
    assert answer.comparison.groups[0].runs[0].scores["acc"].best == 0.5


def test_metrics_that_no_run_has_and_single_runs_are_refused(workspace: Workspace) -> None:
    with pytest.raises(QueryError, match=r"none of these runs has a field 'metrics.acd'; did you mean 'metrics.acc'\?"):
        compared(workspace, SWEEP, metrics=["acd"])
    with pytest.raises(UserError, match="a comparison needs at least two runs, and there is only 00000000"):
        compared(workspace, "0000000001")


def test_a_run_whose_plan_cannot_be_read_is_compared_by_the_rest(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in (1, 2):
        write_run(workspace, number, params={"lr": number}, metrics={"acc": 0.5})
    for plan in (tmp_path / "runs" / "0000000001").glob("**/plan.json"):
        plan.write_text("{")
    answer = compared(workspace, "cn*")
    assert "params.lr" in answer.comparison.differs
    assert [note.split(":")[0] for note in answer.notes] == ["run 0000000001"]
