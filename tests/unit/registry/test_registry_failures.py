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
from helpers.damaged_registry import IDS, SENT, Root
from helpers.full_disk import small_disk
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.config import Config
from slurmtrain.errors import RegistryDamaged, RegistryFailed
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import sqlite
from slurmtrain.registry import store as store_module
from slurmtrain.registry.cells import Sent, write_sent
from slurmtrain.registry.glance import glance
from slurmtrain.registry.store import Spare, Store
from slurmtrain.system.locks import locked

PAGE = 4096
CASES = int(os.environ.get("TEST_DAMAGE_CASES", "4"))
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
    "its first page only": truncated(lambda _: PAGE),
    "half of its header": truncated(lambda _: 50),
    "no header": lambda path: overwrite(path, bytes(100)),
    "garbage for a header": lambda path: overwrite(path, random.Random(1).randbytes(100)),
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
    assert f"it was kept as {root.registry}.damaged" in line
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


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def make_link(path: Path) -> None:
    elsewhere = path.rename(path.with_name("elsewhere.db"))
    overwrite(elsewhere, bytes(100))
    path.symlink_to("elsewhere.db")


def execute(path: Path, *statements: str, cut: int = 0) -> None:
    """Change a database by these statements, and then cut the end of its file off, so many bytes."""
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    os.truncate(path, path.stat().st_size - cut)


def make_text_where_none_was(path: Path) -> None:
    path.write_bytes(b"these are my notes " * 1000)
    path.with_name(".registry.db.lock").unlink()


NO_REGISTRY: dict[str, Callable[[Path], None]] = {
    "directory": lambda path: replaced(path, Path.mkdir),
    "pipe": lambda path: replaced(path, os.mkfifo),
    "link": make_link,
    "other database": lambda path: replaced(path, lambda new: execute(new, "CREATE TABLE notes (text)")),
    "damaged other database": lambda path: replaced(
        path, lambda new: execute(new, "CREATE TABLE notes (text)", "CREATE TABLE more (text)", cut=PAGE)
    ),
    "other application": lambda path: execute(path, "PRAGMA application_id = 42", cut=PAGE),
    "text where no registry was": make_text_where_none_was,
}


@pytest.mark.parametrize("kind", NO_REGISTRY)
def test_what_is_no_registry_is_left_alone_and_the_runs_are_read(root: Root, kind: str) -> None:
    before, _ = root.status()
    NO_REGISTRY[kind](root.registry)
    beside, status = root.beside, root.registry.lstat()
    for _ in range(2):
        after, errors = root.status()
        assert [run["state"] for run in after] == [run["state"] for run in before]
        assert "until that is fixed, commands read the run directories instead" in errors
    assert root.beside == beside
    assert (root.registry.lstat().st_ino, root.registry.lstat().st_mtime) == (status.st_ino, status.st_mtime)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 8192 * 4096)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE attempt SET hosts = '[1, {'",
        "UPDATE attempt SET clock = '{\"n0\": 5}'",
        'UPDATE attempt SET hosts = \'{"node": "n0"}\'',
        "UPDATE attempt SET ended_at = 'yesterday'",
    ],
)
def test_values_that_slurmtrain_has_not_written_are_damage(root: Root, statement: str) -> None:
    before = root.show(IDS[3])
    root.execute(statement)
    assert root.show(IDS[3]) == before
    assert root.beside == ["registry.db", "registry.db.damaged"]
    root.check()


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
                patched.setattr(store_module, "put_registry_aside", kill)
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
        rebuild(root.open(), kill)
    assert {run.attempts[0].reason for run in root.open().store.load_all(IDS).values()} == {"old"}
    root.rebuild()
    root.check()


def test_text_that_is_no_text_is_repaired_by_the_command_that_reads_it(root: Root) -> None:
    before, _ = root.status()
    root.execute("UPDATE run SET state = CAST(x'ff' AS TEXT) WHERE name = 'run-3'")
    after, errors = root.status()
    assert after == before
    assert errors.count("was damaged") == 1
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


@pytest.mark.parametrize("value", ['{"loss": [1]}', "[1, {"])
def test_a_value_that_only_a_listed_run_has_is_reported_with_the_cure(root: Root, value: str) -> None:
    root.execute(f"UPDATE run SET metrics = '{value}', checkpoint = '{value}'")
    [listed, *_] = root.open().store.listed().values()
    for column in ("metrics", "checkpoint"):
        with pytest.raises(RegistryDamaged, match="registry rebuild"):
            getattr(listed, column)


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
    assert line.endswith("; until that is fixed, commands read the run directories instead")
    assert root.beside == ["registry.db"]


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


def test_without_a_replacement_a_failing_registry_raises(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.leave(0)
        with pytest.raises(RegistryFailed, match="full"):
            Store(disk.path / "registry.db")
