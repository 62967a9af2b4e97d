"""What tests of the verbs, of plug-ins and of strategies share."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.fakeslurm import PARTITIONS, SlurmCommands
from helpers.forked_launcher import fork_launchers
from helpers.postgres_server import PostgresServer
from helpers.ranks import Pair
from helpers.workspaces import make_workspace, submit

from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.code.packages import read_software

# On which databases the verbs are tested: TEST_ENGINES=all adds PostgreSQL.
ENGINES = ("sqlite", "postgresql") if os.environ.get("TEST_ENGINES") == "all" else ("sqlite",)


_read_software = functools.cache(read_software)


@pytest.fixture(params=ENGINES)
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    """An empty runs root of its own."""
    runs = tmp_path / "runs"
    if request.param == "sqlite":
        return make_workspace(runs)
    server: PostgresServer = request.getfixturevalue("postgres")
    return make_workspace(runs, registry=server.registry(runs))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """Commands of Slurm's that know of four nodes and of no job."""
    fake = SlurmCommands(tmp_path / "bin")
    fork_launchers(monkeypatch)
    # Packages of this environment, which each submission notes, stay the same.
    for module in ("submit.code_snapshots", "rerun"):
        monkeypatch.setattr(f"slurmtrain.ops.{module}.read_software", _read_software)
    monkeypatch.setenv("PATH", fake.on_path())
    fake.replies("squeue")
    fake.replies("sacct")
    fake.replies("scontrol", PARTITIONS)
    fake.replies("sinfo", "".join(f"n{i}|spot|idle|8|16000|(null)|(null)\n" for i in range(4)))
    fake.replies("sbatch", "Submitted batch job 8\n")
    fake.replies("scancel")
    fake.replies("srun")
    return fake


@pytest.fixture(scope="session")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have saved: saving takes a second, so that it is done once, and tests get copies."""
    from helpers.saved_runs import make_saved_runs

    place = tmp_path_factory.mktemp("saved")
    make_saved_runs(place)
    return place


@pytest.fixture
def training(saved_runs: Path, workspace: Workspace) -> RunDir:
    """A run that trains, on another machine, and has saved."""
    from helpers.saved_runs import copy_run

    return copy_run(saved_runs / "training", workspace)


@pytest.fixture
def ended(saved_runs: Path, workspace: Workspace) -> RunDir:
    """A run of this machine that has saved, and ended."""
    from helpers.saved_runs import copy_run

    return copy_run(saved_runs / "ended", workspace)


@pytest.fixture
def project(tmp_path: Path, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a script, from which runs are submitted to a pretended Slurm."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text("old\n")
    monkeypatch.chdir(place)
    monkeypatch.setattr("slurmtrain.ops.submit.entrances.which_python", lambda: sys.executable)
    monkeypatch.setattr("slurmtrain.ops.rerun.which_python", lambda: sys.executable)
    return place


@pytest.fixture
def submitted(workspace: Workspace, project: Path) -> Callable[..., list[str]]:
    """Submits a spec with a snapshot of the project, with overrides and these keys; returns the ids of the runs."""
    keys: dict[str, Any] = {
        "name": "digits", "command": "python train.py ${params.lr}", "params": {"lr": 0.1}, "seed": 1,
        "code": "snapshot", "tracking": {"mlflow": {"enabled": False}},
    }  # fmt: skip

    def submit_now(*overrides: str, sweep: tuple[str, ...] = (), **more: Any) -> list[str]:
        spec = project / "spec.yaml"
        spec.write_text(yaml.safe_dump({**keys, **more}))
        return submit(workspace, spec, overrides, sweep, executor="slurm").run_ids

    return submit_now


# Two and four processes for all tests of strategies: what two do costs half as much.


@pytest.fixture(scope="session")
def four() -> Iterator[Pair]:
    ranks = Pair(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two() -> Iterator[Pair]:
    ranks = Pair(2)
    yield ranks
    ranks.close()
