"""A registry with runs that differ in what questions are about, and that no process writes to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.postgres_server import PostgresServer
from helpers.queried_runs import write_sweep
from helpers.workspaces import make_workspace

import slurmtrain
from slurmtrain.ops.shared.workspace import Workspace

# On which databases the interface is tested: TEST_ENGINES=all adds PostgreSQL.
ENGINES = ("sqlite", "postgresql") if os.environ.get("TEST_ENGINES") == "all" else ("sqlite",)


@pytest.fixture(params=ENGINES)
def workspace(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The runs root that the registry below finds, as commands would write to it."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    if request.param == "sqlite":
        return make_workspace(runs)
    server: PostgresServer = request.getfixturevalue("postgres")
    monkeypatch.setenv("SLURMTRAIN_REGISTRY", server.url())
    return make_workspace(runs, registry=server.registry(runs))


@pytest.fixture
def registry(workspace: Workspace) -> slurmtrain.Registry:
    """A registry of six runs of a sweep."""
    write_sweep(workspace)
    return slurmtrain.Registry()
