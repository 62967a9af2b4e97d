"""A registry on a PostgreSQL server: whose it is, who waits for whom, and what happens while the server fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from helpers.postgres_server import PostgresServer
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import load_run, make_workspace

from slurmtrain.errors import RegistryFailed, RegistryNewer, RegistryUnusable
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.urls import DatabaseUrl, read_database_url
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.plugins import postgresql
from slurmtrain.registry import schema
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.glance import glance
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.store import Spare, Store, open_engine, reading
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system import locks


@pytest.fixture
def registry(postgres: PostgresServer, tmp_path: Path) -> DatabaseUrl:
    return postgres.registry(tmp_path / "runs")


@pytest.fixture
def run(registry: DatabaseUrl) -> SimulatedRun:
    """A run that has failed, and that the registry knows."""
    workspace = make_workspace(registry.root, registry=registry)
    simulated = SimulatedRun(workspace.root.run(RUN_ID)).created().submitted().started().crashed()
    observe(workspace, ask_slurm=False)
    workspace.store.close()
    return simulated


@pytest.fixture
def role(postgres: PostgresServer) -> Iterator[str]:
    """A role that may connect to the database, and nothing else."""
    postgres.execute("CREATE ROLE guest LOGIN")
    yield "guest"
    postgres.execute("DROP OWNED BY guest; DROP ROLE guest")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits says so at once, and gives up soon."""
    monkeypatch.setattr(locks, "NOTICE_S", 0.0)
    monkeypatch.setattr(postgresql, "LIMIT_S", 0.3)


def of_role(registry: DatabaseUrl, role: str) -> DatabaseUrl:
    return replace(registry, text=registry.text.replace("tests@", f"{role}@"))


# --- whose schema it is ----------------------------------------------------------------------------------------------


def test_the_runs_of_another_root_are_not_mixed_in_and_a_rebuild_takes_the_schema_over(
    run: SimulatedRun, registry: DatabaseUrl, tmp_path: Path
) -> None:
    moved = replace(registry, root=tmp_path / "moved")
    with pytest.raises(RegistryUnusable, match=rf"holds the runs in {registry.root}; name another one with .*rebuild"):
        Store(moved)
    registry.root.rename(moved.root)
    rebuild(make_workspace(moved.root, registry=moved))
    assert load_run(make_workspace(moved.root, registry=moved)).state == "failed"


def test_a_schema_with_other_tables_is_left_alone(postgres: PostgresServer, registry: DatabaseUrl) -> None:
    postgres.execute(f"CREATE SCHEMA {registry.schema}; CREATE TABLE {registry.schema}.run (id text)")
    with pytest.raises(RegistryUnusable, match="holds other tables; name another one"):
        Store(registry)
    with pytest.raises(RegistryUnusable, match="holds other tables"):
        rebuild(make_workspace(registry.root, registry=registry))
    assert postgres.execute(f"SELECT * FROM {registry.schema}.run") == []


def test_what_another_role_has_made_decides_nothing_and_a_role_that_may_make_nothing_is_told_so(
    postgres: PostgresServer, registry: DatabaseUrl, role: str
) -> None:
    with pytest.raises(RegistryFailed, match="permission denied for database postgres; its schema is slurmtrain_"):
        Store(of_role(registry, role))
    postgres.execute(f"CREATE ROLE mallory; CREATE SCHEMA {registry.schema} AUTHORIZATION mallory")
    try:
        with pytest.raises(
            RegistryFailed, match="belongs to the role mallory, and guest is not a member of it; name a"
        ):
            Store(of_role(registry, role))
    finally:
        postgres.execute("DROP OWNED BY mallory; DROP ROLE mallory")


def test_with_the_roles_of_the_documentation_a_group_reads_what_its_members_store(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "registry.md").read_text()
    preparation = page.partition("```sql\n")[2].partition("```")[0]
    of_server, in_database = preparation.split("\\connect runs\n")
    postgres.execute("CREATE ROLE bob LOGIN")
    try:
        for statement in of_server.split(";\n")[:-1]:
            postgres.execute(statement)
        for statement in in_database.split(";\n")[:-1]:
            postgres.execute(statement, database="runs")
        postgres.execute("GRANT vision TO bob")
        ann = read_database_url(postgres.url(user="ann", database="runs")).of_root(tmp_path / "runs")
        SimulatedRun(RunDir(ann.root / RUN_ID)).created(name="cnn")
        workspace = make_workspace(ann.root, registry=ann)
        observe(workspace, ask_slurm=False)
        workspace.store.close()
        names = f"SELECT name, metrics::json ->> 'loss' FROM {ann.schema}.run"
        assert postgres.execute(names, database="runs", user="bob") == [("cnn", None)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            postgres.execute(f"DELETE FROM {ann.schema}.run", database="runs", user="bob")
        with pytest.raises(RegistryFailed, match="belongs to the role ann, and bob is not a member of it"):
            Store(replace(ann, text=ann.text.replace("ann@", "bob@")))
    finally:
        postgres.execute("DROP DATABASE IF EXISTS runs WITH (FORCE)")
        postgres.execute("DROP ROLE IF EXISTS ann, bob, vision")


# --- versions --------------------------------------------------------------------------------------------------------


def test_an_older_registry_is_emptied_but_for_what_was_sent(
    postgres: PostgresServer, registry: DatabaseUrl, run: SimulatedRun
) -> None:
    sent = Sent("mlflow", "uri", offsets={"m": 3}, revision=7)
    with Store(registry) as store, store.begin() as transaction:
        transaction.set_sent("r1", sent)
    postgres.execute(f"UPDATE {registry.schema}.registry SET version = 1")
    postgres.execute(f"ALTER TABLE {registry.schema}.run ADD COLUMN colour text")
    with Store(registry) as store:
        assert (store.index(), store.sent()) == (
            {},
            {"r1": {"mlflow": Sent("mlflow", "uri", offsets={"m": 3}, revision=7)}},
        )
    assert postgres.execute(f"SELECT version FROM {registry.schema}.registry") == [(schema.VERSION,)]


def test_a_newer_registry_is_refused_and_left_alone(
    postgres: PostgresServer, registry: DatabaseUrl, run: SimulatedRun
) -> None:
    postgres.execute(f"UPDATE {registry.schema}.registry SET version = 999")
    with pytest.raises(RegistryNewer, match="schema 999"):
        Store(registry, Spare(list, lambda _: None))
    assert postgres.execute(f"SELECT id FROM {registry.schema}.run") == [(RUN_ID,)]


def test_many_that_open_it_at_once_make_it_once_and_whole(
    postgres: PostgresServer, registry: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(schema.metadata, "create_all", fail)
        with pytest.raises(RuntimeError, match="the power failed"):
            open_engine(registry)
    problems: list[Exception] = []

    def use() -> None:
        try:
            Store(registry).close()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
            problems.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert postgres.execute(f"SELECT count(*) FROM {registry.schema}.registry") == [(1,)]


def test_a_server_that_is_too_old_is_refused(registry: DatabaseUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "OLDEST", 99_00_00)
    with pytest.raises(RegistryFailed, match=r"is on PostgreSQL \d.*; it needs 99 or newer"):
        Store(registry)


def test_a_database_that_cannot_hold_every_text_is_refused(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(RegistryFailed, match="has the encoding LATIN1; make one with CREATE DATABASE"):
        Store(read_database_url(postgres.url(database="latin")).of_root(tmp_path))


# --- several commands at once ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_who_writes_is_named_once_and_read_past(registry: DatabaseUrl, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(registry) as writer, Store(registry) as other, writer.begin() as transaction:
        transaction.set_sent("r1", Sent("mlflow", "uri", revision=1))
        transaction.flush()
        assert other.sent() == {}
        holder = rf"held by slurmtrain on .*, process {os.getpid()}"
        with pytest.raises(RegistryFailed, match=f"{holder}, after 0 s"), other.begin():
            pass
        notices = [line for line in capsys.readouterr().err.splitlines() if line]
        assert len(notices) == 1
        assert notices[0].startswith(f"waiting for the registry {registry}, held by slurmtrain on ")


def test_a_reader_sees_all_tables_at_one_moment(registry: DatabaseUrl, run: SimulatedRun) -> None:
    with Store(registry) as store, reading(open_engine(registry)) as connection:
        count = "SELECT count(*) FROM {}"
        assert connection.exec_driver_sql(count.format("run")).scalar() == 1
        with store.begin() as transaction:
            transaction.clear()
        assert connection.exec_driver_sql(count.format("attempt")).scalar() == 1


def test_commands_that_read_one_growing_run_at_once_read_every_line_once(
    registry: DatabaseUrl, run: SimulatedRun
) -> None:
    problems: list[BaseException] = []
    metrics = registry.root / RUN_ID / "attempts" / f"{run.job}.0" / "metrics.jsonl"

    def read(rounds: int) -> None:
        try:
            with Store(registry) as store:
                for _ in range(rounds):
                    store.write(lambda transaction: ingest(transaction, [RunDir(registry.root / RUN_ID)], dead=False))
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is the finding)
            problems.append(error)

    threads = [threading.Thread(target=read, args=(15,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    with metrics.open("ab") as file:
        for step in range(500):
            file.write(b'{"t": %d, "step": %d, "loss": 1.0}\n{half' % (step + 200, step) + b"}\n")
            file.flush()
    for thread in threads:
        thread.join()
    read(1)
    assert problems == []
    with Store(registry) as store:
        assert len({line.offset for line in store.garbage(RUN_ID)}) == 500
        grown = store.load(RUN_ID)
    rebuild(make_workspace(registry.root, registry=registry))
    with Store(registry) as store:
        assert store.load(RUN_ID) == grown


# --- a server that fails ---------------------------------------------------------------------------------------------


def test_a_server_that_is_down_changes_no_answer_and_is_reported_once(run: SimulatedRun, registry: DatabaseUrl) -> None:
    warnings: list[str] = []
    text = "postgresql://ann:s3cret@127.0.0.1:1/x"
    workspace = make_workspace(registry.root, registry=replace(registry, text=text), warn=warnings.append)
    assert observe(workspace, ask_slurm=False).runs[RUN_ID].state == "failed"
    observe(workspace.looking_again(), ask_slurm=False)
    [warning] = warnings
    assert warning.startswith("the registry postgresql+psycopg://ann@127.0.0.1:1/x cannot be used: connection")
    assert "Connection refused" in warning
    assert "s3cret" not in warning
    assert "\n" not in warning


def test_a_connection_that_is_lost_is_made_again(
    postgres: PostgresServer, registry: DatabaseUrl, run: SimulatedRun
) -> None:
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'slurmtrain%'"
    tries: list[str] = []
    with Store(registry, Spare(list, tries.append)) as store:
        assert set(store.index()) == {RUN_ID}
        postgres.execute(kill)
        assert set(store.index()) == {RUN_ID}

        def change(transaction: Transaction) -> None:
            tries.append("try")
            if len(tries) == 1:
                postgres.execute(kill)
            transaction.set_sent("r1", Sent("mlflow", "uri", revision=len(tries)))

        store.write(change)
        assert tries == ["try", "try"]
        assert store.sent()["r1"]["mlflow"].revision == 2


def test_text_that_postgresql_refuses_is_stored_without_what_it_refuses(registry: DatabaseUrl) -> None:
    run = SimulatedRun(RunDir(registry.root / RUN_ID)).created(name="a\0b")
    workspace = make_workspace(registry.root, registry=registry)
    assert observe(workspace, ask_slurm=False).runs[run.directory.id].name == "a\N{REPLACEMENT CHARACTER}b"
    assert not workspace.store.in_memory


def test_completion_does_not_wait_for_a_server_that_hangs(
    postgres: PostgresServer, registry: DatabaseUrl, run: SimulatedRun
) -> None:
    assert [glimpse.id for glimpse in glance(registry)] == [RUN_ID]
    os.kill(postgres.pid, signal.SIGSTOP)
    try:
        assert glance(registry) == []
    finally:
        os.kill(postgres.pid, signal.SIGCONT)


def test_a_missing_driver_is_named_with_its_remedy(
    registry: DatabaseUrl, run: SimulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "slurmtrain.plugins.postgresql")
    warnings: list[str] = []
    assert set(Store(registry, Spare(lambda: [RunDir(registry.root / RUN_ID)], warnings.append)).index()) == {RUN_ID}
    assert "pip install 'slurmtrain[postgres]'" in warnings[0]
