"""Parameters are numbers in JSON, and printed as they were written everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands
from helpers.simulated_run import SimulatedRun
from rich.cells import cell_len
from unit.cli.test_cli_status import on_a_terminal

from slurmtrain.cli import main

SPEC = """\
name: x
command: python -c pass
tracking: {mlflow: {enabled: false}}
params: {lr: 1e-2, betas: [9e-1, 0.999], opt: {decay: 1_0.50}, seed: 007, twice: "${params.seed}"}
sweep: {params.lr: [1e-3, 1.0e-4]}
"""
Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command beside a spec, where Slurm's commands are fakes; returns what it prints."""
    slurm = SlurmCommands(tmp_path / "bin")
    for name, reply in (("scontrol", PARTITIONS), ("sbatch", "Submitted batch job 8\n"), ("srun", ""), ("scancel", "")):
        slurm.replies(name, reply)
    (tmp_path / "x.yaml").write_text(SPEC)
    monkeypatch.setenv("PATH", slurm.on_path())
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        printed = capsys.readouterr()
        assert not end.value.code, printed.err
        return printed.out

    return command


def test_tables_have_the_written_text_and_json_the_number(call: Call, tmp_path: Path) -> None:
    assert "1e-3" in call("submit", "x.yaml", "--dry-run", "--executor", "slurm")
    for line in call("render", "x.yaml", "--sources").splitlines():
        if line.startswith("params.betas"):
            assert "[9e-1, 0.999]" in line
    call("submit", "x.yaml", "--executor", "slurm", "params.seed=0x1F", "+params.eps=1E-8")
    runs = json.loads(call("status", "--json"))["runs"]
    listed = call("status", runs[0]["sweep"])
    assert all(f"lr={lr}" in listed for lr in ("1e-3", "1.0e-4")), listed
    first = next(run for run in runs if run["params"]["lr"] == 0.001)
    assert first["params"] == {
        "lr": 0.001, "betas": [0.9, 0.999], "opt": {"decay": 10.5}, "seed": 31, "twice": 31, "eps": 1e-8,
    }  # fmt: skip
    settings = "lr=1e-3 betas=[9e-1, 0.999] opt.decay=1_0.50 seed=0x1F twice=0x1F eps=1E-8"
    assert settings in call("show", first["id"])
    assert "0x1F" in call("status", "--columns", "id,params.seed")
    assert f"{first['id']},0.001,31" in call("status", "--csv", "--columns", "id,params.lr,params.seed")
    assert all(lr in call("compare", *(run["id"] for run in runs)) for lr in ("1e-3", "1.0e-4"))
    assert all(lr in call("diff", *(run["id"] for run in runs)) for lr in ("1e-3", "1.0e-4"))
    terminal = on_a_terminal(tmp_path / "runs", 100, runs[0]["sweep"])
    assert any("lr=1e-3" in line for line in terminal)
    assert max(map(cell_len, terminal)) <= 100
    # The journals alone have it.
    call("registry", "rebuild")
    assert settings in call("show", first["id"])


def test_a_run_that_is_the_same_again_and_a_resumed_one_keep_what_was_written(call: Call, tmp_path: Path) -> None:
    call("submit", "x.yaml", "--executor", "slurm", "--sweep", "params.lr=5e-3")
    [run] = json.loads(call("status", "--json"))["runs"]
    again = json.loads(call("rerun", run["id"], "params.seed=0o17", "--executor", "slurm", "--json"))
    assert "lr=5e-3" in (shown := call("show", again["runs"][0]["id"]))
    assert "seed=0o17 twice=0o17" in shown
    changed = {"params": {"lr": 0.005}, "written": [["lr", "50e-4"], ["text"], []], "command": "python x.py"}
    sim = SimulatedRun().created(params={"lr": 0.01}, written=[["lr", "1e-2"]])
    assert str(sim.run.params["lr"]) == "1e-2"
    assert str(sim.submitted(**changed).run.params["lr"]) == "50e-4"
