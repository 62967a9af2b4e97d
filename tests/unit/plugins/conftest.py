"""What tests of plug-ins share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.workspaces import make_workspace

from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty runs root of its own."""
    return make_workspace(tmp_path / "runs")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """Commands of Slurm's that know of no job."""
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    for command in ("squeue", "sacct", "scancel", "srun"):
        fake.replies(command)
    return fake
