"""Copying a registry to another database: everything, or nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from helpers.postgres_server import PostgresServer
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import load_run, make_workspace

from slurmtrain.errors import RegistryFailed, RegistryUnusable, UserError
from slurmtrain.model.urls import DatabaseUrl, read_database_url
from slurmtrain.ops.registries import copy_registry
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import schema, store
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.store import Store, open_engine, reading

# Dies when most of the copy is written.
DIE = """
import os, signal, sys
from pathlib import Path
from slurmtrain.registry import schema, store
from slurmtrain.model.urls import read_database_url
target = sys.argv[2]
real = store._copy_table
def copy(reader, writer, table):
    if table is schema.metadata.sorted_tables[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(reader, writer, table)
store._copy_table = copy
root = Path(sys.argv[3])
store.copy_rows(Path(sys.argv[1]), read_database_url(target).of_root(root) if "://" in target else Path(target))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A registry in a file, with a run of two attempts, a line that is no record, and what was sent to a tracker."""
    workspace = make_workspace(tmp_path / "runs")
    run = SimulatedRun(workspace.root.run(RUN_ID)).created(name="a\0b").submitted().started()
    run.saved(5).reached(7, loss=0.5).crashed()
    with (run.directory.journals / "broken.jsonl").open("wb") as journal:
        journal.write(b"{\x00 half\n")
    observe(workspace, ask_slurm=False)
    with workspace.store.begin() as transaction:
        transaction.set_sent(RUN_ID, Sent("mlflow", "uri", offsets={"m": 3}, revision=7))
    return workspace


def server_address(postgres: PostgresServer, workspace: Workspace) -> str:
    return postgres.registry(workspace.config.runs).text.replace("postgresql:", "postgresql+psycopg:")


def rows(address: Path | DatabaseUrl) -> dict[str, list[tuple[object, ...]]]:
    with reading(open_engine(address)) as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(sa.select(table).order_by(*table.primary_key))]
            for table in schema.metadata.sorted_tables
        }


def test_a_copy_to_a_server_and_back_has_every_row(
    postgres: PostgresServer, workspace: Workspace, tmp_path: Path
) -> None:
    url, back = server_address(postgres, workspace), tmp_path / "back.db"
    outward = copy_registry(workspace, "runs/registry.db", url, tmp_path)
    again = copy_registry(workspace, url, "back.db", tmp_path)
    assert outward.rows == again.rows
    assert {name: len(of_table) for name, of_table in rows(back).items()} == outward.rows
    assert outward.rows["run"] == 1
    replaced = {
        name: repr(of_table).replace("\\x00", "\N{REPLACEMENT CHARACTER}") for name, of_table in rows(back).items()
    }
    original = rows(tmp_path / "runs" / "registry.db")
    assert replaced == {name: repr(r).replace("\\x00", "\N{REPLACEMENT CHARACTER}") for name, r in original.items()}
    on_server = make_workspace(workspace.config.runs, registry=postgres.registry(workspace.config.runs))
    assert observe(on_server, ask_slurm=False).runs[RUN_ID].state == "failed"
    assert load_run(on_server).checkpoints == load_run(workspace).checkpoints
    assert on_server.store.sent() == workspace.store.sent()


def test_a_copy_can_be_repeated_and_replaces_only_runs_that_the_source_has(
    workspace: Workspace, tmp_path: Path
) -> None:
    first = copy_registry(workspace, "runs/registry.db", "copy.db", tmp_path)
    with Store(tmp_path / "copy.db") as store, store.begin() as transaction:
        transaction.set_sent(RUN_ID, Sent("csv", "other", revision=1))
    assert copy_registry(workspace, "runs/registry.db", "copy.db", tmp_path) == first
    assert rows(tmp_path / "copy.db") == rows(tmp_path / "runs" / "registry.db")
    other = make_workspace(tmp_path / "other")
    SimulatedRun(other.root.run("zzzzzzzzzz")).created()
    observe(other, ask_slurm=False)
    before = rows(tmp_path / "other" / "registry.db")
    with pytest.raises(RegistryUnusable, match=r"other/registry\.db has 1 runs that are not in .*, such as zzzzzzzzzz"):
        copy_registry(workspace, "runs/registry.db", "other/registry.db", tmp_path)
    assert rows(tmp_path / "other" / "registry.db") == before


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_copy_that_is_killed_leaves_the_target_as_it_was(
    workspace: Workspace, tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    target: Path | DatabaseUrl = tmp_path / "copy.db"
    address = str(target)
    if engine == "postgresql":
        address = server_address(request.getfixturevalue("postgres"), workspace)
        target = read_database_url(address).of_root(workspace.config.runs)
    command = [sys.executable, "-c", DIE, str(workspace.config.registry), address, str(workspace.config.runs)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not any(rows(target).values())
    copy_registry(workspace, str(workspace.config.registry), address, tmp_path)
    assert len(rows(target)["run"]) == 1


def test_a_copy_that_differs_is_noticed_and_not_kept(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.insert

    def insert_less(*arguments: object) -> str:
        return re.sub(r"VALUES \(\?", "VALUES (substr(?, 2)", real(*arguments))  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store, "insert", insert_less)
        with pytest.raises(RegistryFailed, match=r"is not what was read .* nothing was stored"):
            copy_registry(workspace, "runs/registry.db", "copy.db", tmp_path)
    assert not any(rows(tmp_path / "copy.db").values())


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none.db", "copy.db", "there is no registry at .*none.db"),
        ("runs/registry.db", "./runs/registry.db", "cannot be copied to itself"),
        ("runs/registry.db", "mysql://x/y", "the address of a registry cannot be mysql://"),
        ("runs/registry.db", "postgresql://ann:s3cret@x/y", "given with a password, which everybody .* see"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_the_reason(
    workspace: Workspace, tmp_path: Path, source: str, target: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        copy_registry(workspace, source, target, tmp_path)
    assert "s3cret" not in str(caught.value)
    assert not (tmp_path / "none.db").exists()
    assert not (tmp_path / "copy.db").exists() or (tmp_path / "copy.db").stat().st_size == 0
