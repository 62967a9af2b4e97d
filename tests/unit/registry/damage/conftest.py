"""Runs whose registry is to be damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from helpers.damaged_registry import IDS, SENT, Root
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.ops.shared.observe import observe

LONG_AGO = 1_700_000_000


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root to copy."""
    runs = tmp_path_factory.mktemp("sample") / "runs"
    workspace = make_workspace(runs)
    for number, each in enumerate(IDS):
        simulated = SimulatedRun(workspace.root.run(each), spec={"name": f"run-{number}"}, executor="local")
        simulated.created().submitted().started().reached(number)
        simulated.crashed() if number % 2 else simulated.ended("completed")
        # A command that finds them unchanged for seconds notes that they have settled, whatever else it does.
        for folder in (runs / each).iterdir():
            os.utime(folder, (LONG_AGO, LONG_AGO))
    observe(workspace, ask_slurm=False)
    workspace.store.close()
    with sqlite3.connect(runs / "registry.db") as connection:
        connection.executemany(SENT, [(each,) for each in IDS])
    return runs


@pytest.fixture
def root(tmp_path: Path, sample: Path) -> Root:
    shutil.copytree(sample, tmp_path / "runs")
    return Root(tmp_path / "runs")
