"""A registry that fails is replaced by one in memory, which is read from the run directories."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.full_disk import small_disk
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import load_run, make_workspace

from slurmtrain.config import Config
from slurmtrain.errors import RegistryFailed, RegistryNewer, RegistryUnusable
from slurmtrain.ops.rebuild import rebuild
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.store import Store


@pytest.fixture
def run(tmp_path: Path) -> SimulatedRun:
    """A run that has failed, and that the registry knows."""
    workspace = make_workspace(tmp_path / "runs")
    simulated = SimulatedRun(workspace.root.run(RUN_ID)).created().submitted().started().crashed()
    observe(workspace, ask_slurm=False)
    workspace.store.close()
    return simulated


def opened(runs: Path, registry: Path | None = None) -> tuple[Workspace, list[str]]:
    """What the next command sees, and its warnings."""
    warnings: list[str] = []
    config = Config(runs=runs, executor=None, registry=registry or runs / "registry.db", mlflow_uri=None)
    return Workspace(config, warn=warnings.append), warnings


def resubmitted(run: SimulatedRun) -> None:
    """The run starts again, with another job."""
    run.job = "8"
    run.submitted(2).started(submission=2)


def overwrite(path: Path) -> None:
    path.write_bytes(b"these are my notes " * 100)


def damage_a_table(path: Path) -> None:
    """The list of runs can be read, but not their attempts."""
    with sqlite3.connect(path) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'attempt'").fetchall()
        [(size,)] = connection.execute("PRAGMA page_size").fetchall()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(content)


def spoil_a_text(path: Path) -> None:
    """SQLite finds nothing wrong with it."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE attempt SET failures = '[1, {'")


def make_a_directory_of_it(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [damage_a_table, spoil_a_text, make_a_directory_of_it])
def test_a_broken_registry_changes_no_answer_and_is_reported_once(
    run: SimulatedRun, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    healthy, _ = opened(tmp_path / "runs")
    before = load_run(healthy)
    healthy.store.close()
    damage(tmp_path / "runs" / "registry.db")
    workspace, warnings = opened(tmp_path / "runs")
    assert observe(workspace, ask_slurm=False).runs[RUN_ID].state == before.state
    assert load_run(workspace) == before
    observe(workspace.looking_again(), ask_slurm=False)
    [warning] = warnings
    assert str(tmp_path / "runs" / "registry.db") in warning
    is_file = damage is not make_a_directory_of_it
    assert ("was damaged" if is_file else "move it away") in warning
    # The next command finds a registry like any other.
    workspace, warnings = opened(tmp_path / "runs")
    assert load_run(workspace) == before
    assert warnings == [] or not is_file


def test_what_the_journals_say_meanwhile_is_seen_without_the_registry(run: SimulatedRun, tmp_path: Path) -> None:
    overwrite(tmp_path / "runs" / "registry.db")
    workspace, _ = opened(tmp_path / "runs")
    observe(workspace, ask_slurm=False)
    resubmitted(run)
    assert observe(workspace, ask_slurm=False).runs[RUN_ID].state == "running"


def test_a_registry_whose_disk_is_full_changes_no_answer(run: SimulatedRun, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        healthy, _ = opened(tmp_path / "runs", disk.path / "registry.db")
        observe(healthy, ask_slurm=False)
        healthy.store.close()
        disk.leave(0)
        resubmitted(run)
        workspace, warnings = opened(tmp_path / "runs", disk.path / "registry.db")
        assert observe(workspace, ask_slurm=False).runs[RUN_ID].state == "running"
        assert observe(workspace, ask_slurm=False).runs[RUN_ID].attempt == 2
        # A watch closes the registry before it reports.
        workspace.store.close()
        assert workspace.store.index()[RUN_ID].state == "running"
        [warning] = warnings
        assert "disk is full" in warning
        assert f"free some space in {disk.path}" in warning
        disk.free()
        healed, warnings = opened(tmp_path / "runs", disk.path / "registry.db")
        assert observe(healed, ask_slurm=False).runs[RUN_ID].attempt == 2
        assert warnings == []
        healed.store.close()


@pytest.mark.parametrize("column", ["metrics", "git", "checkpoint"])
def test_a_damaged_value_in_the_list_of_runs_is_reported_with_the_cure(
    run: SimulatedRun, tmp_path: Path, column: str
) -> None:
    with sqlite3.connect(tmp_path / "runs" / "registry.db") as connection:
        connection.execute(f"UPDATE run SET {column} = '[1, {{'")
    workspace, _ = opened(tmp_path / "runs")
    [listed] = workspace.store.listed().values()
    with pytest.raises(RegistryUnusable, match="registry rebuild"):
        getattr(listed, column)


def test_a_registry_of_a_newer_version_is_not_replaced(run: SimulatedRun, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "runs" / "registry.db") as connection:
        connection.execute("PRAGMA user_version = 999")
    workspace, warnings = opened(tmp_path / "runs")
    with pytest.raises(RegistryNewer):
        observe(workspace, ask_slurm=False)
    assert warnings == []


def test_without_a_replacement_a_failing_registry_raises(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.leave(0)
        with pytest.raises(RegistryFailed, match="full"):
            Store(disk.path / "registry.db")


def test_a_rebuild_replaces_a_registry_with_a_damaged_table(run: SimulatedRun, tmp_path: Path) -> None:
    damage_a_table(tmp_path / "runs" / "registry.db")
    rebuild(opened(tmp_path / "runs")[0])
    workspace, warnings = opened(tmp_path / "runs")
    assert load_run(workspace).state == "failed"
    assert warnings == []
