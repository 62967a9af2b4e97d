"""Sweeps before they are submitted: the table of runs, what they may cost, and the question above a limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurmtrain.cli import cli, output
from slurmtrain.errors import UserError

SPEC = """name: x
command: python -c pass
params: {lr: 0.1, act: relu}
resources: {nodes: 2, gpus_per_node: 4, time: "01:00:00"}
sweep: {params.lr: [0.5, 1e-3], points: [{params.act: gelu}, {resources.nodes: 1}]}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a spec of four runs, above 10 GPU-hours, which is the limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMTRAIN_RUNS", raising=False)
    (tmp_path / "x.yaml").write_text(SPEC)
    (tmp_path / "slurmtrain.yaml").write_text("sweep_confirm_gpu_hours: 10\nsweep_max_runs: 7\nexecutor: local\n")
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("command", [("submit", "--dry-run"), ("render",)])
def test_the_table_shows_what_varies_and_the_cost(command: tuple[str, ...], project: Path) -> None:
    shown = call(command[0], "x.yaml", *command[1:])
    assert shown.exit_code == 0
    assert shown.stdout.split("\n")[:7] == [
        "RUN  params.lr  params.act  resources.nodes",
        "1    0.5        gelu",
        "2    0.5                    1",
        "3    1e-3       gelu",
        "4    1e-3                   1",
        "",
        "4 runs, at most 24.0 GPU-hours and 6.0 node-hours per attempt",
    ]
    assert not (project / "runs").exists()


def test_a_dry_run_in_json_has_each_run_and_the_cost() -> None:
    printed = json.loads(call("submit", "x.yaml", "--dry-run", "--json").stdout)
    assert [run["varies"] for run in printed["runs"]][:2] == [
        {"params.lr": 0.5, "params.act": "gelu"},
        {"params.lr": 0.5, "resources.nodes": 1},
    ]
    assert printed["cost_per_attempt"] == {"runs": 4, "node_hours": 6.0, "gpu_hours": 24.0, "runs_without_limit": 0}


def test_a_dry_run_of_one_run_prints_its_cost_alone() -> None:
    shown = call("submit", "x.yaml", "--dry-run", "--sweep", "params.lr=1", "--sweep", "points=[{params.act: a}]")
    assert shown.stdout == "1 run, at most 8.0 GPU-hours and 2.0 node-hours per attempt\n"


def test_off_a_terminal_a_large_sweep_needs_yes(project: Path) -> None:
    refused = call("submit", "x.yaml")
    assert isinstance(refused.exception, UserError)
    assert refused.exception.exit_code == 2
    assert str(refused.exception) == (
        "this sweep is 4 runs, at most 24.0 GPU-hours and 6.0 node-hours per attempt: more than 10 GPU-hours "
        "(sweep_confirm_gpu_hours); nothing was submitted: without a terminal, confirm with --yes"
    )
    assert not (project / "runs").exists()


def test_on_a_terminal_a_large_sweep_is_asked_about(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []
    monkeypatch.setattr(output, "can_ask", lambda: True)

    def decline(question: str) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr(output, "confirm", decline)
    refused = call("submit", "x.yaml")
    assert "nothing was submitted" in refused.stderr
    [question] = questions
    assert question.endswith("more than 10 GPU-hours (sweep_confirm_gpu_hours); submit it?")
    assert not (project / "runs").exists()


def test_the_limit_of_runs_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = call("submit", "x.yaml", "--dry-run", "--sweep", "params.lr=range(4)")
    assert "the sweep has 8 runs, more than the limit of 7; 'sweep_max_runs'" in str(refused.exception)
    monkeypatch.setenv("SLURMTRAIN_SWEEP_MAX_RUNS", "8")
    assert call("submit", "x.yaml", "--dry-run", "--sweep", "params.lr=range(4)").exit_code == 0


def test_render_says_which_code_a_run_would_execute_and_where(project: Path) -> None:
    # The settings of the project are in it, and not the spec.
    size = (project / "slurmtrain.yaml").stat().st_size
    runs = project / "runs/RUN-ID"
    arguments = ("render", "x.yaml", "workdir=.", "--runs", "runs")
    printed = [line for line in call(*arguments).stdout.splitlines() if line.startswith("# code ")]
    copy = f"# code as it is now: a copy of {project} (1 file, {size} B), run in {runs}/code/{project.name}"
    assert set(printed) == {copy}
    as_json = json.loads(call(*arguments, "--json").stdout)["runs"][0]["code"]
    assert as_json == {"root": str(project), "files": 1, "bytes": size, "dir": f"{runs}/code/{project.name}"}
    printed = call(*arguments, "code=none").stdout.splitlines()
    assert f"# code as it is when the run starts, in {project}" in printed


def test_render_tells_where_each_value_of_each_run_comes_from() -> None:
    shown = call("render", "x.yaml", "--sources", "resources.nodes=3")
    assert shown.exit_code == 0
    rows = [line.split(maxsplit=2) for line in shown.stdout.splitlines()]
    assert ["params.lr", "0.5", "sweep, x.yaml:5"] in rows
    assert ["params.lr", "1e-3", "sweep, x.yaml:5"] in rows
    assert ["resources.nodes", "3", "command line (resources.nodes=3)"] in rows
    printed = json.loads(call("render", "x.yaml", "--sources", "--json").stdout)
    sources = {each["key"]: each for each in printed["runs"][0]["sources"]}
    assert sources["params.act"] == {"key": "params.act", "value": "gelu", "origin": "sweep", "place": "x.yaml:5"}


def test_a_search_shows_its_space_its_trials_and_what_they_may_cost(project: Path) -> None:
    text = SPEC.replace("sweep: {", "sweep: {search: {metric: loss, mode: min, trials: 5}, ").replace(
        ", points: [{params.act: gelu}, {resources.nodes: 1}]", ""
    )
    (project / "x.yaml").write_text(text)
    shown = call("submit", "x.yaml", "--dry-run")
    assert shown.exit_code == 0
    assert "params.lr  one of 0.5, 1e-3" in shown.stdout
    assert "a search of 5 trials, 1 at once, for the smallest loss (sampler tpe, pruner none)" in shown.stdout
    assert "5 runs, at most 40.0 GPU-hours" in shown.stdout
    refused = call("submit", "x.yaml")
    assert isinstance(refused.exception, UserError)
    assert "40.0 GPU-hours" in str(refused.exception)
    (project / "x.yaml").write_text(text.replace("trials: 5", "trials: 8"))
    assert "from 1 to 7, found 8" in str(call("submit", "x.yaml").exception)
