"""A registry's file that is damaged in many ways is put aside and made anew; what was none is left alone."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import without_locks
from helpers.damaged_registry import IDS, SENT, Root
from helpers.full_disk import small_disk
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.config import Config
from slurmtrain.errors import RegistryDamaged
from slurmtrain.ops import rebuild as rebuilding
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import sqlite
from slurmtrain.registry import store as store_module
from slurmtrain.registry.glance import glance
from slurmtrain.registry.sent import Sent, write_sent
from slurmtrain.registry.store import Spare, Store
from slurmtrain.system.locks import locked

PAGE = 4096
CASES = int(os.environ.get("TEST_DAMAGE_CASES", "6"))
LONG_AGO = 1_700_000_000
STATUS = "import sys; from slurmtrain.cli import main; main(['status', '--all', '--json', '--runs', sys.argv[1]])"


class Killed(BaseException):
    """Ends the command at one place, as SIGKILL does."""


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
        write_sent(workspace.root.run(each), {SENT.tracker: SENT})
    observe(workspace, ask_slurm=False)
    workspace.store.close()
    return runs


@pytest.fixture
def root(tmp_path: Path, sample: Path) -> Root:
    shutil.copytree(sample, tmp_path / "runs")
    return Root(tmp_path / "runs")


def overwrite(path: Path, content: bytes, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def root_page(path: Path, name: str) -> int:
    """Where the first page of a table or an index begins, in bytes."""
    with sqlite3.connect(path) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,))
    return (int(page) - 1) * PAGE


def truncated(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no last page": truncated(lambda size: size - PAGE),
    "half of its pages": truncated(lambda size: size // PAGE // 2 * PAGE),
    "its first page only": truncated(lambda _: PAGE),
    "half of its last page": truncated(lambda size: size - PAGE // 2),
    "half of its header": truncated(lambda _: 50),
    "a few bytes": truncated(lambda _: 3),
    "no header": lambda path: overwrite(path, bytes(100)),
    "garbage for a header": lambda path: overwrite(path, random.Random(1).randbytes(100)),
    "no first page": lambda path: overwrite(path, bytes(PAGE)),
    "a text": lambda path: path.write_bytes(b"these are my notes " * 1000),
    "no table of attempts": lambda path: overwrite(path, bytes(PAGE), root_page(path, "attempt")),
    "garbage for the table of runs": lambda path: overwrite(
        path, random.Random(2).randbytes(PAGE), root_page(path, "run")
    ),
    "garbage for an index": lambda path: overwrite(
        path, random.Random(3).randbytes(PAGE), root_page(path, "run_state")
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_put_aside_and_replaced_and_that_is_reported_once(root: Root, kind: str) -> None:
    before, _ = root.status()
    DAMAGE[kind](root.registry)
    damaged = root.registry.read_bytes()
    after, errors = root.status()
    assert after == before
    # Nothing that status asks for may be on the damaged page.
    [line] = errors.splitlines() or root.rebuild()
    assert str(root.registry) in line
    assert f"it is kept as {root.registry}.damaged" in line
    assert (root.runs / "registry.db.damaged").read_bytes() == damaged
    assert root.beside == ["registry.db", "registry.db.damaged"]
    root.check()
    assert root.status() == (before, "")
    assert root.registry.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("case", range(CASES))
def test_random_bytes_anywhere_change_no_answer(root: Root, case: int) -> None:
    chance = random.Random(case)
    before, _ = root.status()
    pages = root.registry.stat().st_size // PAGE
    for _ in range(chance.randint(1, 4)):
        page, begin = chance.randrange(pages), chance.randrange(PAGE // 2)
        overwrite(root.registry, chance.randbytes(PAGE - begin), page * PAGE + begin)
    assert root.status()[0] == before
    root.rebuild()
    root.check()
    assert root.status() == (before, "")
    assert root.beside in (["registry.db"], ["registry.db", "registry.db.damaged"])


def test_an_empty_file_is_filled(root: Root) -> None:
    before, _ = root.status()
    root.registry.write_bytes(b"")
    assert root.status() == (before, "")
    root.check()
    assert root.beside == ["registry.db"]


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))
    overwrite(path.with_name("elsewhere.db"), bytes(100))
    path.symlink_to("elsewhere.db")


def make_other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")


def make_other_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 42")
    os.truncate(path, path.stat().st_size - PAGE)


def make_damaged_other_database(path: Path) -> None:
    make_other_database(path)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE more (text)")
    os.truncate(path, path.stat().st_size - PAGE)


def make_text_where_none_was(path: Path) -> None:
    path.write_bytes(b"these are my notes " * 1000)
    path.with_name(".registry.db.lock").unlink()


@pytest.mark.parametrize(
    "make",
    [
        make_directory,
        make_pipe,
        make_link,
        make_other_database,
        make_other_application,
        make_damaged_other_database,
        make_text_where_none_was,
    ],
)
def test_what_is_no_registry_is_left_alone_and_the_runs_are_read(root: Root, make: Callable[[Path], None]) -> None:
    before, _ = root.status()
    make(root.registry)
    beside, status = root.beside, root.registry.lstat()
    for _ in range(2):
        after, errors = root.status()
        assert [run["state"] for run in after] == [run["state"] for run in before]
        assert "meanwhile the run directories are read instead" in errors
    assert root.beside == beside
    assert (root.registry.lstat().st_ino, root.registry.lstat().st_mtime) == (status.st_ino, status.st_mtime)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 8192 * 4096)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE attempt SET hosts = '[1, {'",
        "UPDATE attempt SET clock = '{\"n0\": 5}'",
        "UPDATE attempt SET ended_at = 'yesterday'",
    ],
)
def test_values_that_slurmtrain_has_not_written_are_damage(root: Root, statement: str) -> None:
    before = root.show(IDS[3])
    root.execute(statement)
    assert root.show(IDS[3]) == before
    assert root.beside == ["registry.db", "registry.db.damaged"]
    root.check()


def test_a_second_damaged_file_is_kept_beside_the_first(root: Root) -> None:
    for _ in range(2):
        halve(root.registry)
        root.status()
    assert root.beside == ["registry.db", "registry.db.damaged", "registry.db.damaged1"]


def test_the_journal_of_a_damaged_file_does_not_stay_beside_the_new_one(root: Root) -> None:
    root.registry.write_bytes(b"these are my notes " * 1000)
    root.registry.with_name("registry.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" * 100)
    root.status()
    assert "registry.db-journal" not in root.beside
    root.check()


@pytest.mark.parametrize("effect", ["journal", "sync", "open", "fill"])
def test_what_a_killed_command_leaves_is_completed_by_the_next(
    root: Root, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    before, _ = root.status()
    halve(root.registry)
    root.registry.with_name("registry.db-journal").write_bytes(b"no journal")

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        match effect:
            case "journal":
                patched.setattr(Path, "replace", kill)
            case "sync":
                patched.setattr("slurmtrain.registry.sqlite.fsync_directory", kill)
            case "open":
                patched.setattr(store_module, "put_aside", kill)
            case _:
                patched.setattr(Spare, "fill", kill)
        with pytest.raises(Killed):
            root.status()
    assert root.status()[0] == before
    root.check()
    assert "registry.db.damaged" in root.beside


def test_a_rebuild_that_is_killed_leaves_the_old_registry(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.execute("UPDATE attempt SET reason = 'old'")

    def kill(read: int, _total: int) -> None:
        if read:
            raise Killed

    with pytest.raises(Killed):
        rebuilding.rebuild(root.open(), kill)
    assert {run.attempts[0].reason for run in root.open().store.load_all(IDS).values()} == {"old"}
    root.rebuild()
    root.check()


@pytest.mark.parametrize("column", ["name", "state"])
def test_text_that_is_no_text_is_repaired_by_the_command_that_reads_it(root: Root, column: str) -> None:
    before, _ = root.status()
    root.execute(f"UPDATE run SET {column} = CAST(x'ff' AS TEXT) WHERE name = 'run-3'")
    after, errors = root.status()
    assert after == before
    assert errors.count("was damaged") == 1
    root.check()


def test_a_value_that_only_a_listed_run_has_is_reported_with_the_cure(root: Root) -> None:
    root.execute("UPDATE run SET metrics = '{\"loss\": [1]}'")
    [listed, *_] = root.open().store.listed().values()
    with pytest.raises(RegistryDamaged, match="registry rebuild"):
        _ = listed.metrics


def test_a_damaged_registry_of_an_earlier_version_is_repaired(root: Root) -> None:
    before, _ = root.status()
    root.execute("PRAGMA user_version = 7")
    halve(root.registry)
    after, errors = root.status()
    assert after == before
    assert "was damaged" in errors
    root.check()


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
    halve(root.registry)
    damaged = root.registry.read_bytes()
    glance(root.registry)
    assert root.registry.read_bytes() == damaged
    assert root.beside == ["registry.db"]


def test_of_several_commands_at_once_one_repairs_and_all_answer(root: Root) -> None:
    before, _ = root.status()
    halve(root.registry)
    line = [sys.executable, "-m", "slurmtrain", "status", "--all", "--json", "--runs", str(root.runs)]
    commands = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [command.communicate(timeout=120) for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0]
    assert all(out.count('"state"') >= len(before) for out, _ in printed)
    warnings = [errors for _, errors in printed if "was damaged" in errors]
    assert len(warnings) == 1
    assert root.beside == ["registry.db", "registry.db.damaged"]
    root.check()


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
    halve(root.registry)
    monkeypatch.setattr(sqlite, "LIMIT_S", 0.1)
    with locked(sqlite.lock_beside(root.registry)):
        after, errors = root.status()
    assert after == before
    [line] = errors.splitlines()
    assert "is damaged (" in line
    assert "registry.db.lock is still held by" in line
    assert line.endswith("; meanwhile the run directories are read instead")
    assert root.beside == ["registry.db"]


def test_on_a_full_disk_the_damaged_file_is_kept_and_the_run_directories_are_read(root: Root, tmp_path: Path) -> None:
    warnings: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        place = disk.path / "registry.db"
        config = Config(runs=root.runs, executor=None, registry=place, mlflow_uri=None)
        Workspace(config).store.close()
        shutil.copy(root.registry, place)
        halve(place)
        disk.leave(0)
        workspace = Workspace(config, warn=warnings.append)
        assert len(observe(workspace, ask_slurm=False).runs) == len(IDS)
        [note, warning] = warnings
        assert f"it is kept as {place}.damaged" in note
        assert "disk is full" in warning
        assert (disk.path / "registry.db.damaged").is_file()


def test_who_cannot_report_it_repairs_nothing(root: Root) -> None:
    halve(root.registry)
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
    assert warnings == []
    assert root.beside == ["registry.db"]


def test_a_damaged_registry_is_repaired_on_a_file_system_without_locks(root: Root) -> None:
    if not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    before, _ = root.status()
    line = [sys.executable, str(without_locks.__file__), "ENOLCK", sys.executable, "-c", STATUS, str(root.runs)]
    for damage in (halve, lambda path: path.write_bytes(b"no database" * 1000)):
        damage(root.registry)
        commands = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        printed = [command.communicate(timeout=120) for command in commands]
        assert [command.returncode for command in commands] == [0, 0]
        assert ["was damaged" in errors for _, errors in printed].count(True) == 1
    assert root.status() == (before, "")
    root.check()
    assert root.beside == ["registry.db", "registry.db.damaged", "registry.db.damaged1"]
    assert not list(root.runs.glob(".*.held*"))
