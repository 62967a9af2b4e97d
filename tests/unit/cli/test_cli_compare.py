"""What ``best`` and ``compare`` print."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.workspaces import make_workspace
from rich.cells import cell_len
from unit.cli.test_cli_status import on_a_terminal

from slurmtrain.cli import main


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("compare") / "runs")
    write_sweep(workspace)
    for number in (7, 8):
        layers = {f"layer{index}": number for index in range(8)}
        write_run(workspace, number, "gpt", params={"net": layers, "size": number}, metrics={"loss": number / 10})
    return workspace.root.path


def call(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--runs", str(root), *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def test_best_prints_the_run_its_parameters_and_the_value(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(root, capsys, "best", SWEEP, "--by", "acc")
    assert code == 0
    assert out.splitlines()[1].split()[:6] == ["0000000004", "cnn", "completed", "0.91", "lr=0.1", "seed=1"]
    assert err == "by metrics.acc: larger is better, by its name; --max and --min choose\n"


def test_best_prints_json_alone_and_several_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(root, capsys, "best", "cnn*", "--by", "acc", "--min", "--top", "2", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert (answer["by"], answer["better"]) == ("metrics.acc", "smaller")
    assert [run["id"] for run in answer["runs"]] == ["0000000001", "0000000002"]


def test_best_without_any_value_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(root, capsys, "best", "--by", "loss", "--where", "params.size > 100", "--json")
    assert (code, json.loads(out)["runs"]) == (1, [])
    assert "none of 0 runs has a value of loss" in err
    assert call(root, capsys, "best", SWEEP)[0] == 2


@pytest.mark.parametrize("columns", [80, 140])
def test_a_sweep_is_compared_over_seeds_on_a_terminal(root: Path, columns: int) -> None:
    header, *lines = on_a_terminal(root, columns, SWEEP, "--metrics", "acc", command="compare")
    assert len(lines) == 3
    assert {"ID", "lr", "acc"} <= set(header.split())
    assert "0.905 ±0.0071" in lines[0]
    assert lines[0].startswith("0000000004 +1 ")
    assert max(map(cell_len, lines)) <= columns


def test_few_runs_with_many_differences_are_columns_on_a_narrow_terminal(root: Path) -> None:
    lines = on_a_terminal(root, 80, "gpt", "0000000007", "--by", "loss", command="compare")
    assert lines[0].split() == ["ID", "0000000007", "0000000008"]
    assert [line.split() for line in lines if line.startswith("size ")] == [["size", "7", "8"]]
    narrow = on_a_terminal(root, 60, SWEEP, "--metrics", "acc", command="compare")
    assert [line.split()[0] for line in narrow] == ["ID", "NAME", "STATE", "lr", "seed", "acc", "best"]
    assert max(map(cell_len, narrow)) <= 60
    wide = on_a_terminal(root, 200, "gpt", "0000000007", "--by", "loss", command="compare")
    assert wide[0].split()[:3] == ["ID", "NAME", "STATE"]


def test_long_settings_of_two_runs_are_cut_and_none_is_left_out(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in (1, 2):
        command = f"python train.py --config configs/experiments/{number}/a-long-name-of-a-configuration.yaml"
        git = {"commit": str(number) * 40, "dirty": number == 1}
        write_run(workspace, number, spec={"command": command}, git=git, metrics={"loss": number})
    lines = on_a_terminal(workspace.root.path, 80, "cn*", command="compare")
    assert [line.split()[0] for line in lines] == [
        "ID", "NAME", "STATE", "command", "git.commit", "git.dirty", "loss", "best",
    ]  # fmt: skip
    assert lines[4].split() == ["git.commit", "1" * 12, "2" * 12]
    assert lines[3].count("…") == 2
    assert max(map(cell_len, lines)) <= 80


def test_runs_that_differ_only_in_seeds_are_listed_with_their_mean(root: Path) -> None:
    lines = on_a_terminal(root, 140, SWEEP, "--where", "params.lr = 0.1", "--metrics", "acc", command="compare")
    assert [line.split()[0] for line in lines] == ["ID", "0000000004", "0000000003", "mean"]
    assert "0.905 ±0.0071" in lines[-1]


def test_a_comparison_is_csv_with_a_line_a_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(root, capsys, "compare", SWEEP, "--metrics", "acc", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 6
    assert (rows[0]["id"], rows[0]["params.lr"], rows[0]["acc"], rows[0]["best acc step"]) == (
        "0000000004", "0.1", "0.91", "100",
    )  # fmt: skip
    assert call(root, capsys, "compare", SWEEP, "--csv", "--json")[0] == 2


def test_performance_is_a_table_csv_and_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(root, capsys, "compare", SWEEP, "--performance")
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split()[:5] == ["ID", "NAME", "STATE", "NODES", "PROCS"]
    assert len(lines) == 6
    assert "no steps per second for 6 of 6 runs: it needs two finished steps" in err
    rows = list(csv.DictReader(io.StringIO(call(root, capsys, "compare", SWEEP, "--performance", "--csv")[1])))
    answer = json.loads(call(root, capsys, "compare", SWEEP, "--performance", "--baseline", "0000000002", "--json")[1])
    assert answer["baseline"] == "0000000002"
    assert [row["id"] for row in rows] == [run["id"] for run in answer["runs"]]
    assert rows[0].keys() == answer["runs"][0].keys()


@pytest.mark.parametrize("others", [["--baseline", "gpt"], ["--performance", "--by", "acc"]])
def test_performance_takes_no_metrics_and_a_baseline_is_one_of_performance(
    root: Path, capsys: pytest.CaptureFixture[str], others: list[str]
) -> None:
    code, _, err = call(root, capsys, "compare", "gpt", *others)
    assert code == 2
    assert "--performance" in err


def test_what_failed_is_ranked_behind_what_completed_or_runs_unless_a_condition_asks_for_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_workspace(tmp_path / "runs")
    runs = ((1, "completed", 0.8), (2, "failed", 0.99), (3, "running", 0.9), (4, "completed", float("nan")))
    for number, state, acc in (*runs, (5, "failed", 0.999)):
        write_run(root, number, state=state, params={"lr": number, "seed": 0}, metrics={"acc": acc})

    def ranked(*arguments: str) -> list[int]:
        answer = json.loads(call(root.root.path, capsys, *arguments, "--by", "acc", "--json")[1])
        return [int(run["id"]) for run in answer["runs"]]

    assert ranked("compare", "cnn") == [3, 1, 5, 2, 4], "what is not a number ranks last"
    assert ranked("best", "cnn", "--top", "9") == [3, 1, 5, 2]
    assert ranked("best", "cnn", "--top", "2", "--where", "state in (completed, failed)") == [5, 2]
    assert "run 0000000003 has not completed: it is running" in call(root.root.path, capsys, "best", "--by", "acc")[2]
    _, out, err = call(root.root.path, capsys, "best", "cnn", "--by", "acc", "--where", "state = failed")
    assert out.splitlines()[1].split()[:4] == ["0000000005", "cnn", "failed", "0.999"]
    assert "run 0000000005 has not completed: it is failed" in err
    _, out, _ = call(root.root.path, capsys, "best", "cnn", "--by", "acc", "--over", "lr", "--top", "2")
    assert out.splitlines()[1].split()[:6] == ["0000000003", "4", "2", "failed,", "1", "running"]
    code, _, err = call(root.root.path, capsys, "compare", "cnn", "--where", "params.lr > 9")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: a comparison needs at least two runs, and no run meets the conditions",
    )
