"""What a look at many runs costs: statements and transactions that do not grow with the number of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from helpers.fakeslurm import FakeScheduler, job

from slurmtrain.cli.status_commands import status_command
from slurmtrain.config import Config
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir, run_id
from slurmtrain.ops import sync as sync_module
from slurmtrain.ops.shared import observe as observing
from slurmtrain.ops.shared.mirroring import MirrorOutcome
from slurmtrain.ops.shared.observe import Observed, observe, rebuild
from slurmtrain.ops.shared.views import runs_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.registry import ingest as ingest_module
from slurmtrain.registry import store as store_module
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system import journal_files as journal_files_module
from slurmtrain.system.process import this_process

LONG_AGO_NS = 10**18
FEW, MANY = 2, 23


@dataclass
class Statements:
    """What was asked of SQLite."""

    texts: list[str] = field(default_factory=list)

    @property
    def writing_transactions(self) -> int:
        return self.texts.count("BEGIN IMMEDIATE")


@contextmanager
def counted() -> Iterator[Statements]:
    statements = Statements()

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.texts.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)


def root(tmp_path: Path, count: int) -> Workspace:
    runs = tmp_path / str(count)
    config = Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None)
    return Workspace(config, scheduler=FakeScheduler())


def new_run(workspace: Workspace, number: int, executor: str) -> RunDir:
    run = workspace.root.run(run_id(1_700_000_000_000 + number, number))
    for folder in (run.journals, run.attempts):
        folder.mkdir(parents=True)
    append(run, 1.0, "created", name=f"run-{number}", executor=executor)
    return run


def append(run: RunDir, at: float, kind: str, **keys: object) -> None:
    with (run.journals / "submit.jsonl").open("ab") as file:
        file.write(encode(at, kind, keys))


def ended_runs(tmp_path: Path, count: int) -> Workspace:
    """Local runs that have ended, whose processes are gone, and that nobody has looked at yet."""
    workspace = root(tmp_path, count)
    process = {**this_process().to_dict(), "start": 1}
    for number in range(count):
        run = new_run(workspace, number, "local")
        append(run, 2.0, "submitting", submission=1, job_id="j", attempt=1, executor="local", host=process["host"])
        append(run, 3.0, "submitted", submission=1, job_id="j", process=process)
        attempt = run.attempt("j", 0)
        attempt.path.mkdir()
        agent = {"node": 0, "nodes": 1, "host": "n0", "process": process, "submission": 1, "attempt": 1}
        end = {"cause": "completed", "reason": "", "failed_at": None, "failures": []}
        attempt.node_journal(0).write_bytes(encode(4.0, "agent", agent) + encode(9.0, "end", end))
        attempt.metrics.write_text('{"t": 5, "step": 1, "metrics": {"loss": 2.5}}\n')
        for folder in (run.journals, run.attempts):
            os.utime(folder, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return workspace


def waiting_runs(tmp_path: Path, count: int) -> Workspace:
    """Runs whose jobs wait in Slurm's queue."""
    workspace = root(tmp_path, count)
    assert isinstance(workspace.scheduler, FakeScheduler)
    for number in range(count):
        run = new_run(workspace, number, "slurm")
        append(run, 2.0, "submitting", submission=1, attempt=1, executor="slurm", host="login")
        append(run, 3.0, "submitted", submission=1, job_id=str(number))
        workspace.scheduler.jobs.append(job("PENDING", str(number), run.id, reason="Priority"))
    return workspace


def look(workspace: Workspace) -> Observed:
    """What ``status --json`` does, and as its own process."""
    again = Workspace(workspace.config, scheduler=workspace.scheduler)
    observed = observe(again)
    assert len(runs_json(again, observed.runs)["runs"]) == len(observed.runs)
    again.store.close()
    return observed


def states(observed: Observed) -> set[str]:
    return {row.state for row in observed.runs.index.values()}


def test_a_first_look_sync_and_rebuild_of_many_runs_take_as_many_statements_as_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for number in (FEW, MANY):
        with counted() as statements:
            workspace = ended_runs(tmp_path, number)
            assert states(look(workspace)) == {"completed"}
        with counted() as later:
            sync(Workspace(workspace.config), track=False)
            rebuild(Workspace(workspace.config))
        counts.append([(len(each.texts), each.writing_transactions) for each in (statements, later)])
    assert counts[0] == counts[1]
    # Making the tables, taking in what is there, and noting that nothing more can come; also in several batches.
    assert counts[0][0][1] == 3
    monkeypatch.setattr(ingest_module, "_RUNS_AT_ONCE", 5)
    with counted() as statements:
        assert len(look(ended_runs(tmp_path / "batches", MANY)).runs) == MANY
    assert statements.writing_transactions == 3


def test_a_look_at_runs_that_have_ended_takes_three_statements_and_no_write_lock(tmp_path: Path) -> None:
    for number in (FEW, MANY):
        workspace = ended_runs(tmp_path, number)
        look(workspace)
        with counted() as statements:
            assert states(look(workspace)) == {"completed"}
        lists = [text for text in statements.texts if text.startswith("SELECT") and "FROM run" in text]
        # The ids, what choosing among them takes, and the runs.
        assert (len(lists), statements.writing_transactions) == (3, 0)


def test_a_look_at_many_open_runs_takes_as_many_statements_as_at_few_and_one_question_to_slurm(tmp_path: Path) -> None:
    counts = []
    for number in (FEW, MANY):
        workspace = waiting_runs(tmp_path, number)
        look(workspace)
        assert isinstance(workspace.scheduler, FakeScheduler)
        workspace.scheduler.questions.clear()
        with counted() as statements:
            observed = look(workspace)
        assert states(observed) == {"pending"}
        assert all(listed.live is not None for listed in observed.runs.values())
        assert workspace.scheduler.questions == ["squeue"]
        for present in workspace.run_ids():
            append(workspace.root.run(present), 9.0, "cancel", by="me@login")
        with counted() as news:
            look(workspace)
        counts.append([(len(each.texts), each.writing_transactions) for each in (statements, news)])
    assert counts[0] == counts[1]
    assert [writing for _, writing in counts[0]] == [0, 1]


def test_news_of_an_open_run_is_added_to_what_is_known_without_reading_its_earlier_events(tmp_path: Path) -> None:
    workspace = waiting_runs(tmp_path, FEW)
    look(workspace)
    run = workspace.root.run(workspace.run_ids()[0])
    append(run, 9.0, "mlflow", mlflow_run_id="m", uri="sqlite:///x")
    with counted() as statements:
        observed = look(workspace)
    assert observed.runs[run.id].row["mlflow_run_id"] == "m"
    assert observed.runs[run.id].name == "run-0"
    assert [text for text in statements.texts if "FROM event" in text] == []


def test_status_reads_the_rows_of_the_runs_that_it_shows_and_no_others(tmp_path: Path) -> None:
    workspace = ended_runs(tmp_path, MANY)
    observed = look(workspace)
    rows = []
    fetch = type(observed.runs).fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(observed.runs), "fetch", lambda self, ids: rows.append(list(ids)) or fetch(self, rows[-1]))
        arguments = ["--runs", str(workspace.root.path)]
        printed = CliRunner().invoke(status_command, arguments, standalone_mode=False)
    newest = list(observed.runs)[-20:]
    assert rows == [newest]
    assert [line.split()[0] for line in printed.stdout.splitlines()[1:]] == newest[::-1]


@pytest.mark.parametrize("count", [FEW, MANY])
def test_of_runs_that_go_on_only_new_bytes_are_read_and_of_others_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    workspace = ended_runs(tmp_path, count)
    look(workspace)
    going_on = [new_run(workspace, count + number, "slurm") for number in range(count)]
    look(workspace)
    read: list[int] = []
    read_bytes = journal_files_module.read_bytes

    def counting(*arguments: Any) -> bytes:
        text = read_bytes(*arguments)
        read.append(len(text))
        return text

    monkeypatch.setattr(journal_files_module, "read_bytes", counting)
    look(workspace)
    assert read == []
    for run in going_on:
        append(run, 2.0, "note", text="new", by="me@here")
    with counted() as statements:
        look(workspace)
    line = encode(2.0, "note", {"text": "new", "by": "me@here"})
    assert read == [len(line)] * count
    assert statements.writing_transactions == 1


@pytest.mark.parametrize("count", [MANY, 2 * MANY])
def test_rounds_of_watch_read_new_bytes_of_open_runs_however_many_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(observing, "_FEW", FEW)
    workspace = ended_runs(tmp_path, count)
    look(workspace)
    slurm = workspace.scheduler
    assert isinstance(slurm, FakeScheduler)
    going_on = [new_run(workspace, count + number, "slurm") for number in range(FEW)]
    for number, run in enumerate(going_on):
        append(run, 2.0, "submitting", submission=1, attempt=1, executor="slurm", host="login")
        append(run, 3.0, "submitted", submission=1, job_id=str(number))
        slurm.jobs.append(job("RUNNING", str(number), run.id))
    sync(workspace, track=False)  # also looks at the files of all runs, for the next hour
    files: list[tuple[str, int]] = []
    listed: list[Path] = []
    read_bytes, journal_files = journal_files_module.read_bytes, journal_files_module.journal_files

    def reading(file: Any, *arguments: Any) -> bytes:
        text = read_bytes(file, *arguments)
        files.append((file.name, len(text)))
        return text

    def listing(run: RunDir, *arguments: Any, **more: Any) -> Any:
        listed.append(run.path)
        return journal_files(run, *arguments, **more)

    monkeypatch.setattr(journal_files_module, "read_bytes", reading)
    for module in (store_module, ingest_module):
        monkeypatch.setattr(module, "journal_files", listing)
    for number in range(2):
        slurm.questions.clear()
        append(going_on[0], 4.0 + number, "note", text="new", by="me@here")
        sync(Workspace(workspace.config, scheduler=slurm), track=False)
        assert slurm.questions == ["squeue"]
    line = encode(4.0, "note", {"text": "new", "by": "me@here"})
    assert files == [("journal/submit.jsonl", len(line))] * 2
    assert {*listed} == {run.path for run in going_on}


def test_runs_of_which_trackers_have_everything_are_not_read_to_send_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = ended_runs(tmp_path, MANY)
    look(workspace)
    ids = workspace.run_ids()
    revisions = {each: listed.revision for each, listed in workspace.store.listed(ids).items()}

    def send(transaction: Transaction) -> None:
        for each in ids[1:]:
            transaction.set_sent(each, Sent("mlflow", "u", revision=revisions[each] - (each == ids[2])))

    workspace.store.write(send)
    mirrored: list[list[str]] = []
    monkeypatch.setattr(sync_module, "mirror_runs", lambda _, runs: mirrored.append(list(runs)) or MirrorOutcome())
    sync(Workspace(workspace.config))
    sync(Workspace(workspace.config), [ids[0], ids[1]])
    assert mirrored == [[ids[0], ids[2]], [ids[0]]]
