"""MLflow stores that are opened, made and shared."""

from __future__ import annotations

import multiprocessing
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import mlflow
import pytest
import sqlalchemy as sa
from helpers.accounts import ALICE, BOB, TEAM, needs_accounts, people
from helpers.postgres_server import PostgresServer
from helpers.rare import rare

from slurmtrain.errors import TrackingError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.tracking.to_mlflow import database
from slurmtrain.tracking.to_mlflow.database import artifacts_of, cure, sqlite_file, store_address
from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker

_SENDERS = 2
OPEN = """
import sys
from pathlib import Path
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker
root = Path(sys.argv[1]); root.mkdir()
try:
    tracker = MlflowTracker({"uri": sys.argv[2]}, RunsRoot(root))
    with tracker._asking():
        experiment = tracker._runs._experiment("shared")
        run = tracker._client.create_run(experiment).info.run_id
        (root / "note.txt").write_text("x")
        tracker._client.log_artifact(run, str(root / "note.txt"))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store as MLflow makes it."""
    folder = tmp_path_factory.mktemp("whole")
    MlflowTracker({"uri": f"sqlite:///{folder / 'mlflow.db'}"}, RunsRoot(folder / "runs"))
    return (folder / "mlflow.db").read_bytes()


@pytest.fixture
def store(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of others; nobody is migrating it."""
    monkeypatch.setattr(database, "_STEP_S", 0.0)
    path = tmp_path / "shared" / "mlflow.db"
    path.parent.mkdir()
    path.write_bytes(whole)
    return path


def open_store(path: Path) -> MlflowTracker:
    """Open a store for a runs root that is elsewhere."""
    root = RunsRoot(path.parent.parent / "runs")
    root.path.mkdir(exist_ok=True)
    return MlflowTracker({"uri": f"sqlite:///{path}"}, root)


def execute(path: Path, *statements: str) -> None:
    """Change a store as another client might."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def _open_at_once(index: int, folder: str, uri: str, barrier: Barrier, answers: Any) -> None:
    barrier.wait(120)
    try:
        root = RunsRoot(Path(folder, f"runs-{index}"))
        root.path.mkdir()
        tracker = MlflowTracker({"uri": uri}, root)
        answers.put(tracker._runs._experiment("same"))
    except TrackingError as error:
        answers.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("sqlite", marks=rare), "postgresql"])
def test_several_runs_roots_that_make_one_store_at_once_all_use_it(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 (imported before all begin at once)

    uri = f"sqlite:///{tmp_path}/shared.db"
    if engine == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        server.execute("CREATE DATABASE made_at_once")
        uri = server.url(database="made_at_once")
    # They have imported MLflow already, which takes seconds.
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(_SENDERS), context.Queue()
    senders = [
        context.Process(target=_open_at_once, args=(index, str(tmp_path), uri, barrier, answers))
        for index in range(_SENDERS)
    ]
    for sender in senders:
        sender.start()
    assert [answers.get(timeout=240) for _ in senders] == ["1"] * _SENDERS
    for sender in senders:
        sender.join()
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == ({"shared.db"} if engine == "sqlite" else set()), "nothing else is left"


def test_a_new_store_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(uri: str) -> None:
        file = sqlite_file(uri)
        assert file is not None
        execute(file, "CREATE TABLE runs (a)")
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow, "MlflowClient", killed)
    with pytest.raises(KeyboardInterrupt):
        open_store(tmp_path / "mlflow.db")
    assert not (tmp_path / "mlflow.db").exists()


def test_a_store_of_a_newer_mlflow_is_told_from_one_of_an_older(store: Path) -> None:
    execute(store, "UPDATE alembic_version SET version_num = 'f00df00df00d'")
    with pytest.raises(TrackingError, match=r"newer MLflow than MLflow .* here \(schema f00df00df00d\): install"):
        open_store(store)
    execute(store, "UPDATE alembic_version SET version_num = '451aebb31d03'")
    with pytest.raises(
        TrackingError, match=r"older MLflow .*convert it with 'mlflow db upgrade sqlite:///.*mlflow\.db'"
    ):
        open_store(store)


def test_an_older_store_that_others_share_is_not_migrated_in_passing(store: Path) -> None:
    # MLflow itself migrates one that lacks a table, without a backup, and other clients no longer work.
    execute(store, "UPDATE alembic_version SET version_num = '451aebb31d03'", "DROP TABLE webhook_events")
    before = store.read_bytes()
    with pytest.raises(TrackingError, match="older MLflow"):
        open_store(store)
    assert store.read_bytes() == before


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda path: execute(path, "DELETE FROM alembic_version"), "is incomplete, because a client was interrupted"),
        (lambda path: path.write_bytes(b"no database, but text " * 400), "file is not a database"),
    ],
    ids=["half made", "no database"],
)
def test_a_broken_store_is_told_with_the_way_to_mend_it(
    store: Path, harm: Callable[[Path], object], expected: str
) -> None:
    harm(store)
    with pytest.raises(TrackingError, match=rf"{expected}.*or move it away, such as with 'mv (.*) (.*)\.broken'"):
        open_store(store)
    store.rename(f"{store}.broken")
    open_store(store)


def test_a_deleted_experiment_is_told_with_the_command_that_restores_it(store: Path) -> None:
    tracker = open_store(store)
    identifier = tracker._runs._experiment("digits")
    tracker._client.delete_experiment(identifier)
    with pytest.raises(TrackingError, match=rf"was deleted: .* mlflow experiments restore -x {identifier}' restores"):
        tracker._runs._experiment("digits")
    tracker._client.restore_experiment(identifier)
    assert tracker._runs._experiment("digits") == identifier


def test_artifacts_are_kept_beside_the_store_and_not_in_the_runs_root_that_is_first(store: Path) -> None:
    root = RunsRoot(store.parent.parent / "runs")
    assert artifacts_of(f"sqlite:///{store}", root) == store.parent / "mlartifacts"
    assert artifacts_of(root.mlflow_uri, root) == root.mlflow_artifacts
    assert artifacts_of("postgresql://db/mlflow", root) is None


def test_a_problem_without_a_known_cure_is_told_as_it_is(store: Path) -> None:
    assert cure(f"sqlite:///{store}", "no route to host") == ""
    assert cure("http://server", "unable to open database file") == ""


@rare
@needs_accounts
@pytest.mark.slow
def test_accounts_share_a_store_in_a_directory_that_both_can_write_to(whole: bytes) -> None:
    with people(ALICE, BOB) as (ground, (alice, bob)):
        shared = alice.make_directory(ground / "shared", 0o2770, gid=TEAM)
        shared.chmod(0o2770)
        uri = f"sqlite:///{shared / 'mlflow.db'}"
        for person in (alice, bob):
            completed = person.run("python", "-c", OPEN, person.home / "runs", uri, cwd=person.home, umask=0o077)
            assert completed.returncode == 0, completed.stderr
        assert stat.S_IMODE((shared / "mlflow.db").stat().st_mode) == 0o660

        private = alice.make_directory(ground / "private", 0o755)
        (private / "mlflow.db").write_bytes(whole)
        alice.take(private / "mlflow.db", 0o644)
        uri = f"sqlite:///{private / 'mlflow.db'}"
        completed = bob.run("python", "-c", OPEN, bob.home / "again", uri, cwd=bob.home)
        assert f"belongs to the account {ALICE} and has mode 0644" in completed.stderr


@pytest.mark.parametrize("name", ["runs", "a?b", "a#b", "a%3Fb?c&d=e", "100% ünï", 'it\'s "x"; @:[1]'])
def test_the_mlflow_store_is_in_the_runs_root_whatever_its_name(tmp_path: Path, name: str) -> None:
    root = RunsRoot(tmp_path / name)
    root.path.mkdir()
    for number, locks in enumerate((True, False)):
        engine = sa.create_engine(store_address(root.mlflow_db, locks=locks), poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE TABLE t{number} (x)")
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == ["mlflow.db"]
    assert root.mlflow_db.is_file()
