"""The registry's file: made on first use, upgraded in place, refused when it is not ours."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from slurmtrain.errors import PlaceError, RegistryUnusable
from slurmtrain.registry import schema, upgrade
from slurmtrain.registry.database import open_engine
from slurmtrain.registry.store import Store

COLUMN_MIGRATION = """
import sqlalchemy as sa
from alembic import op
revision = "0002"
down_revision = "0001"
def upgrade():
    op.add_column("run", sa.Column("colour", sa.String()))
    {more}
"""


def version(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def columns(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[1] for row in connection.execute("PRAGMA table_info(run)")]


def put_a_run(path: Path) -> None:
    values = "('r1','n','completed','','local','{}',0,'',1,1,0,0,0)"
    names = (
        "id,name,state,reason,executor,metrics,cancelled,save_problem,attempt,settled,journals_at,attempts_at,revision"
    )
    with sqlite3.connect(path) as connection:
        connection.execute(f"INSERT INTO run ({names}) VALUES {values}")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Migrations of a version to come: ours and one more."""
    location = tmp_path / "migrations"
    shutil.copytree(upgrade.MIGRATIONS, location)
    (location / "versions" / "0002_add_colour.py").write_text(COLUMN_MIGRATION.format(more="pass"))
    monkeypatch.setattr(schema, "HEAD", "0002")
    original = upgrade.upgrade
    monkeypatch.setattr(upgrade, "upgrade", lambda engine, path, at: original(engine, path, at, location))
    return location


def test_it_is_made_on_first_use_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "registry.db"
    Store(path).close()
    assert version(path) == schema.HEAD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_migrations_lead_to_the_tables_of_the_schema(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")
    with engine.begin() as connection:
        schema.alembic_version.create(connection)
    directory = upgrade.scripts()
    assert directory.get_heads() == [schema.HEAD]
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        from alembic.operations import Operations

        with Operations.context(context):
            for script in reversed(list(directory.walk_revisions())):
                script.module.upgrade()
        assert compare_metadata(context, schema.metadata) == []


def test_an_empty_file_as_a_killed_maker_leaves_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.touch()
    Store(path).close()
    assert version(path) == schema.HEAD


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
    assert version(path) == schema.HEAD


def test_an_older_registry_is_upgraded_in_place_with_a_copy_beside_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "registry.db"
    Store(path).close()
    put_a_run(path)
    request.getfixturevalue("newer")
    open_engine(path).dispose()
    assert (version(path), "colour" in columns(path)) == ("0002", True)
    backup = tmp_path / "registry.db.0001.bak"
    assert (version(backup), "colour" in columns(backup)) == ("0001", False)
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT id FROM run").fetchall() == [("r1",)]


def test_a_migration_that_fails_leaves_the_registry_as_it_was(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "registry.db"
    Store(path).close()
    put_a_run(path)
    location = request.getfixturevalue("newer")
    script = COLUMN_MIGRATION.format(more="raise RuntimeError('the power failed')")
    (location / "versions" / "0002_add_colour.py").write_text(script)
    with pytest.raises(RuntimeError, match="the power failed"):
        open_engine(path)
    assert (version(path), "colour" in columns(path)) == ("0001", False)


def test_a_registry_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    before = path.read_bytes()
    with pytest.raises(RegistryUnusable, match=r"newer slurmtrain \(schema 0999\)"):
        Store(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_text("shopping list: milk, bread " * 50)
    with pytest.raises(RegistryUnusable, match="is no database"):
        Store(path)


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(RegistryUnusable, match="not a registry of slurmtrain"):
        Store(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="file"):
        Store(tmp_path / "file" / "registry.db")
