"""The registry's file: made on first use, emptied when it is older, refused when it is newer or not ours."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from slurmtrain.errors import PathError, RegistryUnusable
from slurmtrain.registry import schema
from slurmtrain.registry.sent import Sent
from slurmtrain.registry.store import Store, open_engine

# Of the tables of each version: whoever changes them raises the version, and notes the new tables here.
TABLES = {
    2: "c87c1ccba2bee005",
    3: "5dfc1401c6e9775f",
    4: "3cb2489f6ef82aea",
    5: "cc95fe7b157b3df9",
    6: "8045937212b75890",
    7: "8a15c84e78d107ec",
    8: "edc427bbac92a5b0",
    9: "ce7af7d911ba1e76",
    10: "b2b73e06b433e179",
    11: "32829a3327c45fa9",
    12: "c356a844603a5710",
    13: "b4930411d75ce70f",
    14: "17b94d5e04dca8d3",
}


def version(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def columns(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[1] for row in connection.execute("PRAGMA table_info(run)")]


def of_the_first_version(path: Path) -> None:
    """A registry as the first version left it, with a run, and a note of what was sent to MLflow."""
    Store(path).close()
    run = "INSERT INTO run VALUES ('r1', 'n', 'completed', '', 'local'{})".format(", 0" * (len(columns(path)) - 5))
    with sqlite3.connect(path) as connection:
        connection.execute(run)
        connection.execute("DROP TABLE sent")
        connection.execute("CREATE TABLE mirror (run_id VARCHAR, uri VARCHAR, offsets JSON, revision INTEGER)")
        offsets = json.dumps({"attempts/job.0/metrics.jsonl": 5, "refused": ["train//loss"]})
        connection.execute("INSERT INTO mirror VALUES ('r1', 'sqlite:///x', ?, 7)", [offsets])
        connection.execute("DROP TABLE builder")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        connection.execute("INSERT INTO alembic_version VALUES ('0001')")
        connection.execute("ALTER TABLE run ADD COLUMN colour VARCHAR")
        connection.execute("PRAGMA user_version = 0")


def runs(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM run")]


def test_it_is_made_on_first_use_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "registry.db"
    Store(path).close()
    assert version(path) == schema.VERSION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_change_of_the_tables_is_a_new_version() -> None:
    statements = [str(sa.schema.CreateTable(table)) for table in schema.metadata.sorted_tables]
    digest = hashlib.sha256("".join(statements).encode()).hexdigest()
    assert TABLES[schema.VERSION] == digest[:16]


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


def test_a_registry_of_the_first_version_is_emptied_with_a_copy_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    of_the_first_version(path)
    with Store(path) as store:
        assert store.index() == {}
        # No run directory says what was sent to MLflow: sending it all again would take hours.
        offsets = {"attempts/job.0/metrics.jsonl": 5}
        sent = Sent("mlflow", "sqlite:///x", offsets=offsets, revision=7, refused=["train//loss"])
        assert store.sent() == {"r1": {"mlflow": sent}}
    assert (version(path), "colour" in columns(path)) == (schema.VERSION, False)
    backup = tmp_path / "registry.db.0.bak"
    assert (runs(backup), "colour" in columns(backup)) == (["r1"], True)
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600


def test_making_the_tables_anew_fails_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.db"
    of_the_first_version(path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(schema.metadata, "create_all", fail)
        with pytest.raises(RuntimeError, match="the power failed"):
            open_engine(path)
    assert (version(path), runs(path), "colour" in columns(path)) == (0, ["r1"], True)
    Store(path).close()
    assert version(path) == schema.VERSION


def test_a_registry_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    before = path.read_bytes()
    with pytest.raises(RegistryUnusable, match=r"newer slurmtrain \(schema 999\)"):
        Store(path)
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
