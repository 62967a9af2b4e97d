"""Whatever a run has that is very long: lines stay readable, and ``--json`` has it whole."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.rare import drawn, rare
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace
from rich.cells import cell_len

from slurmtrain.cli import main, output
from slurmtrain.cli.output import LONGEST_CELL, LONGEST_LINE
from slurmtrain.plugins.top import top_rows as page

ID, OTHER = "0123456789", "0123456788"
NAME, TAG = "n" * 5_000, "t" * 10_000
TEXT = "word " * 1_000 + "w" * 5_000
PARAMS = {"files": [f"data/shard-{number:05}.tar" for number in range(900)], "n" * 300: 1}
# Words around a text that is cut, such as how much more there is.
_AROUND = 100
# Columns of a table that several long fields were asked for.
_FIELDS = "id,name,params.files,params.text,tags,reason"
COMMANDS = [
    ("status", "--all"), ("status", "--columns", _FIELDS), ("status", "--sort", "name"), ("show", ID),
    ("show", ID, "-v"), ("compare", ID, OTHER), ("diff", ID, OTHER), ("best", ID, OTHER, "--by", "loss"),
    ("best", NAME), ("tag", ID),
    ("checkpoints", ID), ("nodes",), ("why", ID), ("verify", ID), ("clean", "--dry-run"), ("sync",), ("wait", ID),
    ("cancel", NAME), ("show", NAME + "x"), ("status", "--where", f"params.text = '{TEXT}"), ("tag", ID, TAG),
    ("note", ID, TEXT), ("resume", ID, f"params.x={TEXT}"), ("rerun", ID, f"x.y={TEXT}"), ("rerun", ID, f"{NAME}=1"),
    ("logs", NAME + "x"), ("plot", ID),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with two runs that have everything at length."""
    workspace = make_workspace(tmp_path_factory.mktemp("long") / "runs")
    for run_id in (ID, OTHER):
        _write_run(SimulatedRun(workspace.root.run(run_id), spec=_spec(run_id), executor="local", now=time.time() - 99))
    return workspace.root.path


def _spec(run_id: str) -> dict[str, Any]:
    return {"params": {**PARAMS, "text": TEXT + run_id}, "command": f"python t.py {TEXT}{run_id}"}


def _write_run(sim: SimulatedRun) -> None:
    inherited = {"OMP_NUM_THREADS": TEXT, "X" * 5_000: "1"}
    metrics = {"loss": 0.5, "m" * 5_000: 1.0, **{f"metric{number}": 0.5 for number in range(300)}}
    sim.created(name=NAME, **_spec(sim.directory.path.name), overrides=[f"params.text={TEXT}"])
    sim.command("tags", add=[TAG, *(f"tag-{number}" for number in range(300))]).command("note", text=TEXT)
    sim.submitted(overrides=[f"params.text={TEXT}"], partition=NAME, inherited=inherited)
    sim.started(host="h" * 5_000, nodes=2).reached(3, **metrics)
    sim.node("preflight", findings=[{"check": "gpu", "status": "warn", "summary": TEXT, "evidence": {"x": TEXT}}])
    sim.ended("crash", reason=TEXT)
    logs = sim.directory.attempt(sim.job, 0).path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "rank-0.log").write_text(f"Traceback (most recent call last):\nValueError: {TEXT}\n")


def call(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--runs", str(root), *arguments])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("arguments", drawn(COMMANDS, 9), ids=lambda words: " ".join(words)[:40])
def test_lines_elsewhere_have_a_limit(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    _, out, err = call(root, capsys, *arguments)
    # Cells of tables have their own.
    limit = LONGEST_LINE if _FIELDS not in arguments else (LONGEST_CELL + _AROUND) * (_FIELDS.count(",") + 1)
    assert out or err
    for line in (*out.splitlines(), *err.splitlines()):
        assert len(line) <= limit + _AROUND * 2, line


@pytest.mark.parametrize("columns", [80, pytest.param(140, marks=rare)])
@pytest.mark.parametrize("arguments", drawn(COMMANDS, 9), ids=lambda words: " ".join(words)[:40])
def test_lines_on_a_terminal_fit_unless_they_are_a_word(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], columns: int
) -> None:
    with output.collected(columns) as page:
        _, _, err = call(root, capsys, *arguments)
    for line in (*re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", page.getvalue()).splitlines(), *err.splitlines()):
        assert cell_len(line) <= columns or len(line.split()) <= 2, line
        assert len(line) <= LONGEST_CELL + _AROUND, line


@pytest.mark.parametrize("columns", [80, 140])
def test_the_pane_of_a_run_fits(root: Path, capsys: pytest.CaptureFixture[str], columns: int) -> None:
    run = json.loads(call(root, capsys, "show", ID, "--json")[1])["run"]
    lines = page.fact_lines(page.facts(run, run["attempts"]), columns)
    assert max(cell_len(page.label(name)) + cell_len(text) for name, text in lines) <= columns


def test_json_has_it_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(call(root, capsys, "show", ID, "--json")[1])["run"]
    listed = json.loads(call(root, capsys, "status", ID, "--json")[1])["runs"][0]
    for run in (shown, listed):
        assert run["params"] == _spec(ID)["params"]
        assert (run["name"], TAG in run["tags"]) == (NAME, True)
    assert (shown["command"], shown["note"]) == (_spec(ID)["command"], TEXT)
    assert shown["attempts"][0]["inherited"]["OMP_NUM_THREADS"] == TEXT
    assert shown["attempts"][0]["nodes"][0] == "h" * 5_000
