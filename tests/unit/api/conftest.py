"""A registry with runs that differ in what questions are about, and that no process writes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.queried_runs import write_sweep
from helpers.workspaces import make_workspace

import slurmtrain
from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The runs root that the registry below finds, as commands would write to it."""
    monkeypatch.chdir(tmp_path)
    return make_workspace(tmp_path / "runs")


@pytest.fixture
def registry(workspace: Workspace) -> slurmtrain.Registry:
    """A registry of six runs of a sweep."""
    write_sweep(workspace)
    return slurmtrain.Registry()
