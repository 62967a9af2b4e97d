"""Questions about whole curves: best, at a step, area, and means over repetitions, after rollbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.workspaces import make_workspace

from slurmtrain import history
from slurmtrain.cli import main
from slurmtrain.errors import QueryError
from slurmtrain.model.query.conditions import parse
from slurmtrain.model.query.fields import value_of
from slurmtrain.ops.query import compare as module
from slurmtrain.ops.query.compare import Ranking, put_side_by_side, rank
from slurmtrain.ops.query.select import Question, select_runs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A sweep, one run that gets worse again, one that has only begun, and one that logs nothing."""
    workspace = make_workspace(tmp_path_factory.mktemp("measures") / "runs")
    write_sweep(workspace)
    write_run(workspace, 7, "gpt", params={"seed": 1}, history=[{"ppl": 8.0}, {"ppl": 2.0}, {"ppl": 4.0}])
    write_run(workspace, 8, "gpt", params={"seed": 2}, history=[{"ppl": 3.0}], state="running")
    write_run(workspace, 9, "gpt", params={"seed": 3}, state="created")
    return workspace


def columns_of(workspace: Workspace, **question: Any) -> list[dict[str, Any]]:
    """The values of the columns of a question, by run."""
    runs = select_runs(
        workspace, observe(workspace, ask_slurm=False).runs, Question(for_programs=True, **question)
    ).runs
    return [{name: value_of(run, name) for name in ("id", *question.get("columns", ()))} for run in runs]


def ids(workspace: Workspace, **question: Any) -> list[int]:
    return [int(run["id"]) for run in columns_of(workspace, **question)]


def ranked(workspace: Workspace, by: str, *names: str, over: tuple[str, ...] = ()) -> Ranking:
    question = Question(names=names, namesakes=bool(names), for_programs=True, over=over)
    return rank(workspace, observe(workspace, ask_slurm=False).runs, question, by, None)


def test_measures_are_columns_conditions_and_orders(workspace: Workspace) -> None:
    columns = ("min:ppl", "max:ppl", "last:ppl", "ppl@2", "area:ppl")
    rows = columns_of(workspace, names=["gp*"], columns=columns)
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (2.0, 8.0, 4.0, 2.0, 8.0),
        (3.0, 3.0, 3.0, None, None),
        (None, None, None, None, None),
    ]
    assert ids(workspace, where=["min:ppl < 3"]) == [7]
    assert ids(workspace, where=["ppl@1 > 2 and ppl@1 < 5"]) == [8]
    assert ids(workspace, where=["name = gpt and min:ppl = null"]) == [9]
    assert ids(workspace, names=["gp*"], sort="-max:ppl") == [7, 8, 9]


def test_curves_are_read_only_of_runs_that_other_conditions_leave_and_for_none_that_the_registry_knows(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    blocks = history.read_blocks

    def note(path: Path, *arguments: Any, **more: Any) -> Any:
        read.append(path.stem)
        return blocks(path, *arguments, **more)

    monkeypatch.setattr(history, "read_blocks", note)
    assert ids(workspace, where=["min:ppl < 3"], columns=["max:ppl", "last:ppl"]) == [7]
    assert compare_best(workspace) == 2.0
    assert read == []
    assert ids(workspace, where=["state = completed and name = gpt and area:ppl > 1"]) == [7]
    assert read == ["0000000007"]


def compare_best(workspace: Workspace) -> float | None:
    question = Question(names=["gpt"], namesakes=True, for_programs=True)
    answer = put_side_by_side(workspace, observe(workspace, ask_slurm=False).runs, question, ["ppl"])
    return answer.comparison.groups[0].runs[1].scores["ppl"].best


def test_the_registry_leaves_out_runs_by_their_summaries(workspace: Workspace) -> None:
    runs = observe(workspace, ask_slurm=False).runs
    for text, expected in (("min:ppl < 3", [7]), ("max:ppl >= 3", [7, 8]), ("last:ppl > 3.5 or last:ppl < 1", [7])):
        narrowed = [int(run_id) for run_id in runs.candidates([parse(text, 0.0)], put_away=False)]
        assert narrowed == expected


def test_of_thousands_of_runs_the_database_finds_the_best(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [run["id"] for run in ranked(workspace, "max:acc").runs]
    monkeypatch.setattr(module, "_RANKED", 3)
    ranking = ranked(workspace, "max:acc")
    assert [run["id"] for run in ranking.runs] == expected[:3]
    assert (ranking.without, value_of(ranking.runs[0], "max:acc")) == (3, 0.91)


def test_runs_are_ranked_by_measures(workspace: Workspace) -> None:
    ranking = ranked(workspace, "min:ppl", "gpt")
    assert [int(run["id"]) for run in ranking.runs] == [7, 8]
    assert (str(ranking.criterion), ranking.without) == ("by min:ppl: smaller is better", 1)
    with pytest.raises(QueryError, match="none of these runs has a metric 'ppp'; did you mean 'ppl'"):
        ranked(workspace, "min:ppp", "gpt")


def test_a_metric_that_is_called_like_a_measure_comes_first(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    write_run(workspace, 1, metrics={"acc@1": 0.5, "acc": 0.75})
    write_run(workspace, 2, metrics={"acc@1": 0.25, "acc": 0.8})
    assert ranked(workspace, "acc@1").criterion.name == "metrics.acc@1"
    assert ranked(workspace, "max:acc@1").criterion.name == "max:acc@1"
    assert ids(workspace, where=["metrics.acc@1 > 0.4"]) == [1]


def test_repetitions_are_ranked_by_their_mean(workspace: Workspace) -> None:
    ranking = ranked(workspace, "max:acc", SWEEP, over=("params.seed",))
    assert [group.params["lr"] for group in ranking.groups] == [0.1, 1.0, 0.01]
    facts = ranking.groups[0].to_json()
    assert (facts["runs"], facts["count"], facts["params"]) == (
        ["0000000004", "0000000003"],
        2,
        {"lr": 0.1, "epochs": 10},
    )
    assert (facts["mean"], facts["deviation"]) == (pytest.approx(0.905), pytest.approx(0.00707, rel=1e-2))
    assert len(ranked(workspace, "acc", SWEEP, over=("params.lr", "params.seed")).groups) == 1
    with pytest.raises(QueryError, match=r"none of these runs has a field 'params.sed'; did you mean 'params.seed'"):
        ranked(workspace, "acc", SWEEP, over=("params.sed",))


def test_comparisons_take_measures_and_what_counts_as_a_repetition(workspace: Workspace) -> None:
    question = Question(names=[SWEEP], for_programs=True, over=("params.lr",))
    answer = put_side_by_side(
        workspace, observe(workspace, ask_slurm=False).runs, question, ["min:loss", "acc"], "max:acc"
    )
    facts = answer.to_json()
    assert (facts["by"], facts["metrics"]) == ("max:acc", ["max:acc", "min:loss", "acc"])
    assert [group["settings"] for group in facts["groups"]] == [{"params.seed": 1}, {"params.seed": 0}]
    assert facts["groups"][0]["metrics"]["min:loss"]["last"]["mean"] == pytest.approx(0.37)
    assert facts["runs"][0]["metrics"]["max:acc"] == {"last": 0.91, "best": None, "best_step": None}


def called(workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--runs", str(workspace.root.path), *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def test_commands_print_measures(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(workspace, capsys, "status", "gp*", "--columns", "id,min:ppl,ppl@2", "--csv")
    assert (code, out.splitlines()[:2]) == (0, ["id,min:ppl,ppl@2", "0000000007,2.0,2.0"])
    _, out, _ = called(workspace, capsys, "status", "gp*", "--sort", "min:ppl", "--json")
    assert "min:ppl" not in json.loads(out)["runs"][0]
    code, out, _ = called(workspace, capsys, "best", SWEEP, "--by", "acc", "--over", "seed")
    assert out.split("\n")[0].split() == ["BEST", "RUNS", "STATE", "NAME", "mean", "acc", "PARAMS"]
    assert out.split("\n")[1].split() == ["0000000004", "2", "completed", "cnn", "0.905", "±0.0071", "lr=0.1"]
    _, out, _ = called(workspace, capsys, "best", SWEEP, "--by", "max:acc", "--over", "params.seed", "--json")
    facts = json.loads(out)
    assert (facts["over"], facts["by"], len(facts["groups"]), len(facts["runs"])) == (["params.seed"], "max:acc", 1, 1)
    _, out, _ = called(workspace, capsys, "compare", SWEEP, "--metrics", "acc,loss@100", "--over", "lr", "--csv")
    assert out.splitlines()[0].endswith("acc,best acc,best acc step,loss@100")
    code, _, err = called(workspace, capsys, "status", "--where", "mim:ppl < 3")
    assert (code, err.splitlines()[0]) == (2, "error: there is no measure 'mim'; did you mean 'min'?")
