"""Repairing a registry: what counts as damage, several commands at once, and what keeps a command from it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import without_locks
from helpers.damaged_registry import IDS, Root
from helpers.full_disk import small_disk

from slurmtrain.config import Config
from slurmtrain.errors import RegistryDamaged
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.damage import repair as repair_module
from slurmtrain.registry.damage import spare
from slurmtrain.registry.damage.repair import Repaired
from slurmtrain.registry.damage.spare import Spare
from slurmtrain.registry.glance import glance
from slurmtrain.registry.sent import Sent
from slurmtrain.registry.sqlite import connections
from slurmtrain.registry.store import Store
from slurmtrain.system.locks import locked


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 8192 * 4096)


# --- what counts as damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        'UPDATE run SET metrics = \'{"loss": "low"}\'',
        "UPDATE run SET checkpoint = '{\"step\": 4}'",
        "UPDATE run SET id = CAST(x'ff' AS TEXT) WHERE name = 'run-4'",
        "UPDATE run SET name = x'ff'",
        "UPDATE run SET reason = CAST(x'ff' AS TEXT)",
        'UPDATE attempt SET hosts = \'{"first": "n0"}\'',
        "UPDATE attempt SET clock = '{\"n0\": 5}'",
        "UPDATE attempt SET failures = '[5]'",
        "UPDATE attempt SET ended_at = 'yesterday'",
        "UPDATE event SET data = '[1]'",
        "UPDATE line SET made_of = '{}'",
        "UPDATE source SET offset = 'all'",
        "UPDATE sent SET offsets = '[1, {'",
    ],
)
def test_values_that_commands_cannot_read_are_damage(root: Root, statement: str) -> None:
    before, _ = root.status()
    root.execute(statement)
    [table] = [word for word in statement.split() if word in ("run", "attempt", "event", "line", "source", "sent")]
    repaired = root.repair()
    if "CAST" not in statement:
        assert repaired.damage[0].startswith(f"the table {table} holds what slurmtrain has not written (")
    assert repaired.kept is not None
    assert root.check() == []
    assert root.status() == (before, "")
    assert root.sent() == ([] if table == "sent" else IDS)


def test_show_repairs_a_registry_with_values_that_it_cannot_read(root: Root) -> None:
    before = root.show(IDS[3])
    root.execute("UPDATE attempt SET clock = '{\"n0\": 5}'")
    assert root.show(IDS[3]) == before
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert root.sent() == IDS


@pytest.mark.parametrize("column", ["name", "state"])
def test_text_that_is_no_text_is_repaired_by_the_command_that_reads_it(root: Root, column: str) -> None:
    before, _ = root.status()
    root.execute(f"UPDATE run SET {column} = CAST(x'ff' AS TEXT) WHERE name = 'run-3'")
    after, errors = root.status()
    assert after == before
    assert errors.count("was damaged") == 1
    assert root.check() == []


def test_what_trackers_have_is_repaired_by_the_command_that_reads_it(root: Root) -> None:
    root.execute("UPDATE sent SET refused = '{\"from\": [1]}'")
    warnings: list[str] = []
    assert root.open(warnings.append).store.sent() == {}
    [warning] = warnings
    assert "was damaged" in warning
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert root.check() == []


def test_a_value_that_only_a_listed_run_has_is_reported_with_the_cure(root: Root) -> None:
    root.execute("UPDATE run SET metrics = '{\"loss\": [1]}'")
    [listed, *_] = root.open().store.listed().values()
    with pytest.raises(RegistryDamaged, match="registry rebuild"):
        _ = listed.metrics


def test_a_damaged_registry_of_an_earlier_version_is_repaired(root: Root) -> None:
    before, _ = root.status()
    root.execute("PRAGMA user_version = 7")
    truncate(root.registry)
    after, errors = root.status()
    assert after == before
    assert "was damaged" in errors
    assert root.check() == []


def test_the_journal_of_a_command_that_was_killed_is_no_damage(root: Root, tmp_path: Path) -> None:
    before, _ = root.status()
    with sqlite3.connect(root.registry) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("UPDATE event SET data = '[1]'")
        writer.execute("UPDATE run SET name = 'half'")
        # The state in which a kill at this moment would leave both.
        copy = Root(tmp_path / "copy")
        shutil.copytree(root.runs, copy.runs)
        writer.rollback()
    assert "registry.db-journal" in copy.beside
    assert copy.status() == ([{**run, "dir": run["dir"].replace("/runs/", "/copy/")} for run in before], "")
    assert copy.beside == ["registry.db"]


def test_completion_changes_nothing(root: Root) -> None:
    truncate(root.registry)
    damaged = root.registry.read_bytes()
    glance(root.registry)
    assert root.registry.read_bytes() == damaged
    assert root.beside == ["registry.db"]


# --- several commands -------------------------------------------------------------------------------------------------


def test_of_two_repairs_at_once_one_replaces_the_file(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(root.registry)
    at_lock: list[bool] = []
    both_there, held = threading.Event(), repair_module.held

    @contextmanager
    def noting(lock: Path) -> Iterator[None]:
        at_lock.append(True)
        if len(at_lock) == 2:
            both_there.set()
        with held(lock):
            assert both_there.wait(60)
            yield

    monkeypatch.setattr(repair_module, "held", noting)
    results: list[Repaired] = []
    threads = [threading.Thread(target=lambda: results.append(root.repair())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bool(result.damage) for result in results) == [False, True]
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert root.check() == []


def test_of_several_commands_at_once_one_repairs_and_all_answer(root: Root) -> None:
    before, _ = root.status()
    truncate(root.registry)
    line = [sys.executable, "-m", "slurmtrain", "status", "--all", "--json", "--runs", str(root.runs)]
    commands = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [command.communicate(timeout=120) for command in commands]
    assert [command.returncode for command in commands] == [0, 0]
    assert all(out.count('"state"') >= len(before) for out, _ in printed)
    warnings = [errors for _, errors in printed if "was damaged" in errors]
    assert len(warnings) == 1
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert root.check() == []


def test_a_command_that_has_the_replaced_file_open_goes_on_with_the_new_one(root: Root) -> None:
    workspace = root.open(pytest.fail)
    store = workspace.store
    assert len(store.index()) == len(IDS)
    copy = root.registry.with_name("copy.db")
    shutil.copy(root.registry, copy)
    copy.replace(root.registry)
    store.write(lambda transaction: transaction.set_sent(IDS[0], Sent("csv", "uri")))
    store.close()
    assert sorted(root.open().store.sent([IDS[0]])[IDS[0]]) == ["csv", "mlflow"]
    assert not store.in_memory


def test_while_another_process_has_the_lock_the_run_directories_are_read(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = root.status()
    truncate(root.registry)
    monkeypatch.setattr(connections, "LIMIT_S", 0.1)
    with locked(connections.lock_beside(root.registry)):
        after, errors = root.status()
    assert after == before
    [line] = errors.splitlines()
    assert "is damaged (" in line
    assert "registry.db.lock is still held by" in line
    assert line.endswith("; meanwhile the run directories are read instead")
    assert root.beside == ["registry.db"]


# --- what keeps a command from it -------------------------------------------------------------------------------------


def test_very_many_runs_are_not_read_anew_unasked(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = root.status()
    truncate(root.registry)
    monkeypatch.setattr(spare, "_MOST_RUNS", len(IDS) - 1)
    for _ in range(2):
        after, errors = root.status()
        assert after == before
        assert "'slurmtrain registry repair' replaces it; meanwhile the run directories are read" in errors
    assert root.beside == ["registry.db"]
    assert root.repair().runs == len(IDS)
    assert root.status() == (before, "")


def test_on_a_full_disk_the_damaged_file_stays_and_no_other_is_left(root: Root, tmp_path: Path) -> None:
    warnings: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        place = disk.path / "registry.db"
        config = Config(runs=root.runs, executor=None, registry=place, mlflow_uri=None)
        Workspace(config).store.close()
        shutil.copy(root.registry, place)
        truncate(place)
        disk.leave(0)
        workspace = Workspace(config, warn=warnings.append)
        assert len(observe(workspace, ask_slurm=False).runs) == len(IDS)
        [warning] = warnings
        assert "disk is full" in warning
        assert sorted(path.name for path in disk.path.iterdir() if "registry.db" in path.name) == [
            ".registry.db.lock",
            "registry.db",
        ]


def test_who_cannot_report_it_repairs_nothing(root: Root) -> None:
    truncate(root.registry)
    assert len(observe(root.open(), ask_slurm=False).runs) == len(IDS)
    assert root.beside == ["registry.db"]


def test_what_slurmtrain_itself_cannot_read_is_no_reason_to_put_a_file_aside(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("a fault of our own")

    monkeypatch.setattr("slurmtrain.registry.queries.rows", fails)
    warnings: list[str] = []
    runs = [root.open().root.run(each) for each in IDS]
    with (
        Store(root.registry, Spare(lambda: runs, warnings.append, warnings.append)) as store,
        pytest.raises(ValueError, match="own"),
    ):
        store.sent()
    [warning] = warnings
    assert "a new registry is no better (" in warning
    assert root.beside == ["registry.db"]


# --- a file system without locks --------------------------------------------------------------------------------------

STATUS = "import sys; from slurmtrain.cli import main; main(['status', '--all', '--json', '--runs', sys.argv[1]])"


def test_a_damaged_registry_is_repaired_on_a_file_system_without_locks(root: Root) -> None:
    if not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    before, _ = root.status()
    line = [sys.executable, str(without_locks.__file__), "ENOLCK", sys.executable, "-c", STATUS, str(root.runs)]
    truncate(root.registry)
    commands = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [command.communicate(timeout=120) for command in commands]
    assert [command.returncode for command in commands] == [0, 0]
    assert ["was damaged" in errors for _, errors in printed].count(True) == 1
    assert root.status() == (before, "")
    assert root.check() == []
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert not list(root.runs.glob(".*.held*"))
