"""Checking, repairing, copying and compacting the registry; rebuilding it in several processes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.errors import RegistryUnusable, UserError
from slurmtrain.model.run.ids import run_id
from slurmtrain.ops import registry_care
from slurmtrain.ops.rebuild import rebuild
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import parallel_ingest
from slurmtrain.registry.damage import repair as repair_module
from slurmtrain.registry.damage.repair import Repaired

RUNS = 7
IDS = [run_id(1_700_000_000_000 + number, number) for number in range(RUNS)]
SENT = "INSERT INTO sent VALUES (?, 'mlflow', 'u', 'r', '{}', 5, '{}', 9, '[]', '', NULL)"


class Killed(BaseException):
    """Ends the command at one place, as SIGKILL does."""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Runs that have failed, which the registry knows."""
    workspace = make_workspace(tmp_path / "runs")
    for each in IDS:
        SimulatedRun(workspace.root.run(each)).created().submitted().started().crashed()
    observe(workspace, ask_slurm=False)
    workspace.store.close()
    with sqlite3.connect(registry_of(workspace)) as connection:
        connection.executemany(SENT, [(each,) for each in IDS])
    return again(workspace)


def again(workspace: Workspace) -> Workspace:
    return Workspace(workspace.config)


def registry_of(workspace: Workspace) -> Path:
    assert isinstance(workspace.config.registry, Path)
    return workspace.config.registry


def check(workspace: Workspace, *, deep: bool = False) -> list[str]:
    return registry_care.check(again(workspace), deep=deep, show=lambda _done, _total: None)


def repair(workspace: Workspace) -> Repaired:
    return registry_care.repair(again(workspace), lambda _done, _total: None)


def sent(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT run_id FROM sent ORDER BY run_id")]


def change(workspace: Workspace, statement: str) -> None:
    with sqlite3.connect(registry_of(workspace)) as connection:
        connection.execute(statement)


def damage_a_table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'attempt'").fetchall()
        [(size,)] = connection.execute("PRAGMA page_size").fetchall()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(content)


def overwrite(path: Path) -> None:
    path.write_bytes(b"these are my notes " * 1000)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def test_an_intact_registry_is_one_that_equals_the_run_directories(workspace: Workspace) -> None:
    assert check(workspace) == []
    assert check(workspace, deep=True) == []


@pytest.mark.parametrize("damage", [damage_a_table, overwrite, truncate])
def test_damage_of_the_file_is_found(workspace: Workspace, damage: Callable[[Path], None]) -> None:
    damage(registry_of(workspace))
    assert check(workspace)


def test_rows_of_runs_without_a_row_are_found(workspace: Workspace) -> None:
    change(workspace, f"DELETE FROM run WHERE id = '{IDS[0]}'")
    assert any("rows of runs that the table run does not have" in problem for problem in check(workspace))


def test_a_deep_check_finds_what_the_run_directories_have_otherwise(workspace: Workspace) -> None:
    change(workspace, f"UPDATE attempt SET reason = 'another' WHERE run_id = '{IDS[2]}'")
    assert check(workspace) == []
    assert check(workspace, deep=True) == [f"run {IDS[2]} is not stored as its directory has it"]


def test_what_is_no_registry_is_an_error_and_not_damage(workspace: Workspace) -> None:
    path = registry_of(workspace)
    path.unlink()
    with pytest.raises(UserError, match="there is no registry"):
        check(workspace)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(RegistryUnusable, match="not a registry"):
        repair(workspace)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT * FROM notes").fetchall() == []


def test_a_repair_changes_nothing_in_an_intact_registry(workspace: Workspace) -> None:
    before = registry_of(workspace).read_bytes()
    assert repair(workspace) == Repaired(registry_of(workspace), [])
    assert registry_of(workspace).read_bytes() == before


def test_a_repair_keeps_what_was_sent_and_the_damaged_file(workspace: Workspace) -> None:
    path = registry_of(workspace)
    damage_a_table(path)
    damaged = path.read_bytes()
    repaired = repair(workspace)
    assert repaired.damage
    assert (repaired.kept, repaired.sent) == (path.with_name("registry.db.damaged"), RUNS)
    assert path.with_name("registry.db.damaged").read_bytes() == damaged
    assert sent(path) == IDS
    assert check(workspace, deep=True) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_repair_keeps_both_damaged_files(workspace: Workspace) -> None:
    for kept in ("registry.db.damaged", "registry.db.damaged1"):
        damage_a_table(registry_of(workspace))
        assert repair(workspace).kept == registry_of(workspace).with_name(kept)


def test_the_journal_of_a_damaged_file_does_not_stay_beside_the_new_one(workspace: Workspace) -> None:
    overwrite(registry_of(workspace))
    journal = registry_of(workspace).with_name("registry.db-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" * 100)
    assert repair(workspace).sent == 0
    assert not journal.exists()
    assert check(workspace, deep=True) == []


@pytest.mark.parametrize("effect", ["fill", "take over", "journal", "link", "rename", "sync"])
def test_a_repair_that_is_killed_is_completed_by_the_next(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    path = registry_of(workspace)
    damage_a_table(path)
    path.with_name("registry.db-journal").write_bytes(b"no journal")

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        match effect:
            case "fill":
                patched.setattr(parallel_ingest, "read_runs", kill)
            case "take over":
                patched.setattr(repair_module, "salvage", kill)
            case "journal":
                patched.setattr(Path, "rename", kill)
            case "link":
                patched.setattr(os, "link", kill)
            case "rename":
                patched.setattr(Path, "replace", kill)
            case _:
                patched.setattr(repair_module, "fsync_directory", kill)
        with pytest.raises(Killed):
            repair(workspace)
    repair(workspace)
    assert check(workspace, deep=True) == []
    assert sent(path) == IDS


def test_a_backup_is_a_private_registry_and_replaces_no_file(workspace: Workspace, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    assert registry_care.back_up(workspace, target) == target.stat().st_size
    assert target.stat().st_mode & 0o777 == 0o600
    assert sent(target) == IDS
    with pytest.raises(UserError, match="exists"):
        registry_care.back_up(workspace, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "runs"]


def test_a_backup_that_is_killed_leaves_no_file_of_its_name(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(os, "link", kill)
    with pytest.raises(Killed):
        registry_care.back_up(workspace, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_a_vacuum_gives_the_space_of_deleted_rows_back(workspace: Workspace) -> None:
    change(workspace, "CREATE TABLE large AS SELECT randomblob(1000000) AS data")
    change(workspace, "DROP TABLE large")
    before, after = registry_care.vacuum(workspace)
    assert after < before - 900_000
    assert check(workspace, deep=True) == []


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Already a few runs are read by several processes."""
    monkeypatch.setattr(parallel_ingest, "FEW", 0)
    monkeypatch.setattr(parallel_ingest, "_BATCH", 2)
    monkeypatch.setattr(parallel_ingest, "_MOST_PROCESSES", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("several_processes")
def test_several_processes_make_the_registry_that_one_makes(workspace: Workspace) -> None:
    journal = workspace.root.run(IDS[3]).journals / "odd-1.jsonl"
    journal.write_bytes(b"no record\n")
    (workspace.root.run(IDS[4]).journals / "pipe.jsonl").symlink_to("nowhere")
    shown: list[tuple[int, int]] = []
    observed = rebuild(workspace, lambda done, total: shown.append((done, total)))
    assert [each for each, _ in observed.garbage] == [IDS[3]]
    assert observed.runs[IDS[4]].state == "unreadable"
    assert shown == [(0, RUNS), (2, RUNS), (4, RUNS), (6, RUNS), (7, RUNS)]
    assert check(workspace, deep=True) == []
    assert sent(registry_of(workspace)) == IDS


@pytest.mark.usefixtures("several_processes")
def test_a_rebuild_that_is_killed_leaves_the_old_registry(workspace: Workspace) -> None:
    change(workspace, "UPDATE attempt SET reason = 'old'")

    def kill(count: int, _total: int) -> None:
        if count == 4:
            raise Killed

    with pytest.raises(Killed):
        rebuild(workspace, kill)
    reader = again(workspace)
    assert {run.attempts[0].reason for run in reader.store.load_all(IDS).values()} == {"old"}
