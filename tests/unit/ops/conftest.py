"""What tests of the verbs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import PARTITIONS, SlurmCommands
from helpers.workspaces import make_workspace

from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty runs root of its own."""
    return make_workspace(tmp_path / "runs")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """Commands of Slurm's that know of four nodes and of no job."""
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    fake.replies("squeue")
    fake.replies("sacct")
    fake.replies("scontrol", PARTITIONS)
    fake.replies("sinfo", "".join(f"n{i}|spot|idle|8|16000|(null)|(null)\n" for i in range(4)))
    fake.replies("sbatch", "Submitted batch job 8\n")
    fake.replies("scancel")
    fake.replies("srun")
    return fake
