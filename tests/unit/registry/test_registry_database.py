"""The registry's file: made on first use, emptied when it is older, refused when it is newer or not ours."""

from __future__ import annotations

import hashlib
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from slurmtrain.errors import PathError, RegistryUnusable
from slurmtrain.model.run.run import Run
from slurmtrain.registry import schema
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.store import Spare, Store, open_engine

# Of the tables of this version: whoever changes them raises the version.
TABLES = (16, "73a748b9cc63dc01")
UNKNOWN: dict[str, Any] = {"settled": True, "scanned": (), "revision": 0}


def version(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_it_is_made_on_first_use_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "registry.db"
    Store(path).close()
    assert version(path) == schema.VERSION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_change_of_the_tables_is_a_new_version() -> None:
    statements = [str(sa.schema.CreateTable(table)) for table in schema.metadata.sorted_tables]
    digest = hashlib.sha256("".join(statements).encode()).hexdigest()
    assert (schema.VERSION, digest[:16]) == TABLES


def test_an_empty_file_as_a_killed_maker_leaves_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.touch()
    Store(path).close()
    assert version(path) == schema.VERSION


def test_many_that_open_it_at_once_make_it_once(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    problems: list[Exception] = []

    def use() -> None:
        try:
            Store(path).close()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
            problems.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert version(path) == schema.VERSION


def of_an_earlier_version(path: Path) -> Sent:
    """A registry whose table of runs had another column; what it says was sent to a tracker."""
    sent = Sent("mlflow", "sqlite:///x", offsets={"attempts/job.0/metrics.jsonl": 5}, revision=7, refused=["a//b"])
    with Store(path) as store, store.begin() as transaction:
        transaction.put(Run(id="r1", name="n", state="completed", reason="", executor="local"), (), **UNKNOWN)
        transaction.set_sent("r1", sent)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE builder")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        connection.execute("ALTER TABLE run ADD COLUMN colour VARCHAR")
        connection.execute("PRAGMA user_version = 0")
    return sent


def test_a_registry_of_an_earlier_version_is_emptied_but_for_what_was_sent_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registry.db"
    sent = of_an_earlier_version(path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(schema.metadata, "create_all", fail)
        with pytest.raises(RuntimeError, match="the power failed"):
            open_engine(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT id, colour FROM run").fetchall() == [("r1", None)]
    with Store(path) as store:
        assert (store.index(), store.sent()) == ({}, {"r1": {"mlflow": sent}})
    assert version(path) == schema.VERSION


def test_a_registry_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    before = path.read_bytes()
    with pytest.raises(RegistryUnusable, match=r"newer slurmtrain \(schema 999\)"):
        Store(path, Spare(list, pytest.fail))
    assert path.read_bytes() == before


def test_what_is_no_registry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("shopping list: milk, bread " * 50)
    with sqlite3.connect(tmp_path / "songs.db") as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    for name, error, message in (
        ("text", RegistryUnusable, "is not a readable database"),
        ("songs.db", RegistryUnusable, "not a registry of slurmtrain"),
        ("text/registry.db", PathError, "text"),
    ):
        with pytest.raises(error, match=message):
            Store(tmp_path / name)
