"""Questions to ``status``: what is printed on terminals, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.screens import screen
from helpers.workspaces import make_workspace
from rich.cells import cell_len
from unit.cli.test_cli_status import on_a_terminal

from slurmtrain.cli import main
from slurmtrain.model.query.conditions import parse


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("questions") / "runs")
    write_sweep(workspace)
    write_run(workspace, 7, "gpt", params={"layers": 12}, metrics={"loss": 0.5}, tags=["good"], state="failed")
    return workspace.root.path


def status(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of ``status``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--runs", str(root), "status", *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_runs_of_a_sweep_show_what_differs_among_them(root: Path, columns: int) -> None:
    header, *lines = on_a_terminal(root, columns, "cnn*")
    assert header.split()[:4] == ["ID", "NAME", "STATE", "PARAMS"]
    settings = [line[header.index("PARAMS") :].split("  ")[0].strip() for line in lines]
    assert settings == [f"lr={lr} seed={seed}" for lr in ("1", "0.1", "0.01") for seed in (1, 0)]
    assert max(map(cell_len, lines)) <= columns


def test_what_a_question_sorts_by_is_shown_on_80_columns(root: Path) -> None:
    header, *lines = on_a_terminal(root, 80, SWEEP, "--sort", "-metrics.acc", "--limit", "2")
    assert header.split()[:4] == ["ID", "NAME", "STATE", "metrics.acc"]
    assert [line.split()[3] for line in lines[:2]] == ["0.91", "0.9"]
    assert lines[-1] == "and 4 more: 1 running, 3 completed" or len(lines) == 2


def test_chosen_columns_are_shown_also_if_they_are_empty(root: Path) -> None:
    header, *lines = on_a_terminal(root, 60, "--columns", "id,cause,sweep,params.layers", "--where", "params.layers=12")
    assert header.split() == ["id", "cause", "sweep", "params.layers"]
    assert lines[0].split() == ["0000000007", "oom", "-", "12"]


def test_times_are_local_on_a_terminal_and_iso_elsewhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--columns", "id,submitted_at", "--where", "id = 0000000001")
    assert re.fullmatch(r"0000000001  \w{3} \d\d:\d\d\s*", on_a_terminal(root, 60, *question)[1])
    assert re.fullmatch(r"0000000001  [\d-]{10}T[\d:.]{12}Z", status(root, capsys, *question)[1].splitlines()[1])


def test_csv_has_all_parameters_and_metrics_of_all_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = status(root, capsys, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert "\r\n" in out
    assert [row["id"] for row in rows] == [f"{number:010d}" for number in range(1, 8)]
    assert (rows[2]["params.lr"], rows[2]["params.seed"], rows[2]["metrics.acc"], rows[2]["params.layers"]) == (
        "0.1", "0", "0.9", "",
    )  # fmt: skip
    assert (rows[6]["tags"], rows[6]["nodes"], rows[6]["cause"], rows[6]["sweep"]) == ("good", "n1", "oom", "")


def test_csv_and_json_print_chosen_columns(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--columns", "id,params.lr", "--where", "state = running")
    assert status(root, capsys, "--csv", *arguments)[1] == "id,params.lr\r\n0000000006,1.0\r\n"
    printed = json.loads(status(root, capsys, "--json", *arguments)[1])
    assert printed["runs"] == [{"id": "0000000006", "params.lr": 1.0}]
    assert status(root, capsys, "--csv", "--json")[0] == 2


def test_no_match_is_no_error_and_leaves_standard_output_empty(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = status(root, capsys, "--where", "params.lr > 100")
    assert (code, out) == (0, "")
    assert err == "none of 7 runs matches; 'slurmtrain status --all' lists all\n"


def test_a_mistake_is_shown_under_the_expression(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = status(root, capsys, "--where", "state = running and params.lrr < 1")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: none of these runs has a field 'params.lrr'; did you mean 'params.lr'?",
        "error:   state = running and params.lrr < 1",
        "error:                       ^",
    ]


def test_watch_answers_the_question_again_and_again(root: Path) -> None:
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (5, 80))
    question = ("--sort", "-metrics.acc", "--columns", "id,params.lr,tags")
    argv = [sys.executable, "-m", "slurmtrain", "status", "--runs", str(root), "--watch", "--interval=0.5", *question]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    with subprocess.Popen(argv, stdout=terminal, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(terminal)
        drawn = b""
        # The table is drawn once, and once more over it.
        while drawn.count(b"and 5 more: 1 failed") < 2:
            drawn += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        process.wait()
    os.close(controller)
    header, *lines = screen(drawn.decode(), 80, 5)
    assert header.split() == ["id", "params.lr", "tags"]
    assert [line.split()[0] for line in lines[:2]] == ["0000000004", "0000000003"]


PAGE = (Path(__file__).parents[3] / "docs" / "queries.md").read_text()
EXAMPLES = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_page_works(root: Path, capsys: pytest.CaptureFixture[str], example: str) -> None:
    _, *words = shlex.split(example.partition(" >")[0] if example.endswith(".csv") else example)
    with pytest.raises(SystemExit) as end:
        main(["--runs", str(root), *words])
    assert end.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("condition", re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Conditions")[2], re.M))
def test_every_condition_of_the_page_is_one(condition: str) -> None:
    assert parse(condition, time.time()).holds({}) in (True, False)


# --- sweeps as one line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 140, 200])
def test_a_sweep_is_one_line_with_its_states(root: Path, columns: int) -> None:
    _, *lines = on_a_terminal(root, columns)
    first, last = lines[0], lines[-1]
    assert [first.split()[:2], last.split()[:2]] == [[SWEEP, "cnn"], ["0000000007", "gpt"]]
    assert re.search(r"1 running, 5 completed, \dd\d\dh old", first)
    assert max(map(cell_len, lines)) <= columns
    together = " ".join(" ".join(lines[:-1]).split())
    assert "lr 0.01|0.1|1, seed 0|1; best 0000000004 acc=0.91" in together


def test_the_best_run_of_a_search_is_the_best_by_what_it_is_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number, (loss, gain) in enumerate(((0.1, 1.0), (0.5, 3.0), (0.9, 2.0)), 1):
        search = {"metric": "gain", "mode": "max", "trials": 3}
        write_run(
            workspace, number, sweep=SWEEP, search=search, params={"lr": loss}, metrics={"loss": loss, "gain": gain}
        )
    assert "best 0000000002 gain=3" in status(workspace.root.path, capsys)[1]


def test_a_sweep_is_unfolded_where_its_runs_are_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = status(root, capsys)[1].splitlines()
    assert len(lines) == 1 + 2
    assert "1 running, 5 completed  lr 0.01|0.1|1, seed 0|1" in lines[1]
    assert "'slurmtrain status 00000000sw' lists the runs of the sweep" in status(root, capsys)[2]
    for question in ([SWEEP], ["--no-fold"], ["cnn*"], ["--state", "completed"], ["--sort", "id"]):
        assert SWEEP not in status(root, capsys, *question)[1], question
    summary = (
        rf"sweep {SWEEP}: 1 running, 5 completed, \dd\d\dh old; lr 0.01\|0.1\|1, seed 0\|1; best 0000000004 acc=0.91"
    )
    assert re.search(summary, status(root, capsys, SWEEP)[2])
    assert len(status(root, capsys, "--no-fold")[1].splitlines()) == 1 + 7
    assert len(json.loads(status(root, capsys, "--json")[1])["runs"]) == 7
