"""What ranks get from the shell of the person is named before anything is submitted, with either executor."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands

from slurmtrain.cli import main

SPEC = "name: x\ncommand: python -c pass\nenv: {MKL_NUM_THREADS: 2}\ntracking: {mlflow: {enabled: false}}\n"


@pytest.mark.parametrize("executor", ["local", "slurm"])
@pytest.mark.parametrize("command", ["render", "doctor"])
def test_variables_that_reach_the_ranks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, executor: str
) -> None:
    slurm = SlurmCommands(tmp_path / "bin")
    for name, reply in (("scontrol", PARTITIONS), ("sinfo", ""), ("sacctmgr", ""), ("srun", ""), ("squeue", "")):
        slurm.replies(name, reply)
    (tmp_path / "x.yaml").write_text(SPEC)
    monkeypatch.setenv("PATH", slurm.on_path())
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    for name in ("PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "9")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([command, "x.yaml", "--executor", executor])
    printed = " ".join("".join(capsys.readouterr()).split())
    assert f"ranks get from this environment: PYTHONPATH={tmp_path}, OPENBLAS_NUM_THREADS=9" in printed
    assert "MKL_NUM_THREADS=3" not in printed
