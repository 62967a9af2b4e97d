"""Runs roots for tests of commands, and shortcuts to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_run import JOB, RUN_ID, SimulatedRun
from slurmtrain.config import Config
from slurmtrain.model.run.run import Run
from slurmtrain.model.urls import DatabaseUrl
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import Submission, load, submit_spec
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.slurm.scheduler import Scheduler


def make_workspace(
    runs: Path,
    scheduler: Scheduler | None = None,
    registry: Path | DatabaseUrl | None = None,
    warn: Callable[[str], None] = pytest.fail,
) -> Workspace:
    """The runs root ``runs`` without MLflow.

    Args:
        runs: Its directory.
        scheduler: Replaces Slurm.
        registry: Where its registry is; by default a file of its own.
        warn: Called with the reason when the registry fails, and the run directories are read instead.
    """
    config = Config(runs=runs, executor=None, registry=registry or runs / "registry.db", mlflow_uri=None)
    return Workspace(config, scheduler=scheduler, warn=warn)


def build_run(workspace: Workspace, *, executor: str = "slurm", job: str = JOB, **spec: Any) -> SimulatedRun:
    """A run that was created long ago, before any job that sacct shows in tests. ``spec``: keys of its spec."""
    return SimulatedRun(workspace.root.run(RUN_ID), spec=spec, executor=executor, job=job, now=99.0)


def submit(
    workspace: Workspace, path: Path, overrides: Sequence[str] = (), sweep: Sequence[str] = (), *, executor: str
) -> Submission:
    """Submit all runs of the spec in a file, as the command does."""
    spec = load(path, overrides, sweep, max_runs=workspace.config.sweep_max_runs)
    return submit_spec(workspace, spec, executor=executor)


def sync_again(workspace: Workspace) -> Synced:
    """What another command observes and does, with no state from previous ones."""
    return sync(Workspace(workspace.config, warn=pytest.fail), track=False)


def load_run(workspace: Workspace, run_id: str = RUN_ID) -> Run:
    """A run as stored in the registry."""
    run = workspace.store.load(run_id)
    assert run is not None
    return run
