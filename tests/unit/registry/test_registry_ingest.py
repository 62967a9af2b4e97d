"""Reading run directories: from stored offsets, again and again, whatever is in the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmtrain.model.run.events.agent_events import PreflightDone
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.urls import DatabaseUrl
from slurmtrain.registry import queries
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.store import Store, open_engine
from slurmtrain.system import journal_files

RUN_ID = "0123456789"


@pytest.fixture
def store(registry_address: Path | DatabaseUrl) -> Store:
    return Store(registry_address)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / RUN_ID)
    directory.journals.mkdir(parents=True)
    (directory.attempts / "job.0").mkdir(parents=True)
    return directory


def journal(run: RunDir) -> Path:
    return run.journals / "submit.jsonl"


def metrics(run: RunDir) -> Path:
    return run.attempts / "job.0" / "metrics.jsonl"


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.writelines(lines)


def read_again(store: Store, run: RunDir, *, dead: bool = False) -> Run:
    with store.begin() as transaction:
        ingest(transaction, [run], dead=dead)
    loaded = store.load(run.id)
    assert loaded is not None
    return loaded


CREATED = encode(1.0, "created", {"name": "n", "executor": "local"})
SUBMITTING = encode(2.0, "submitting", {"job_id": "job", "restart": 0, "attempt": 1})


def test_only_new_bytes_are_read(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED)
    assert store.unread([run]) == [run]
    assert read_again(store, run).state == "created"
    assert store.unread([run]) == []
    assert store.ask(lambda db: queries.offsets(db, [run.id])) == {run.id: {"journal/submit.jsonl": len(CREATED)}}
    append(journal(run), SUBMITTING)
    assert store.unread([run]) == [run]
    assert read_again(store, run).state == "pending"


def test_garbage_in_the_middle_is_kept_aside_and_the_rest_is_read(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED, b"\x00\xff not json\n", b'{"t":1}\n', SUBMITTING)
    assert read_again(store, run).state == "pending"
    assert [(bad.offset, bad.source) for bad in store.garbage(run.id)] == [
        (len(CREATED), "journal/submit.jsonl"),
        (len(CREATED) + 12, "journal/submit.jsonl"),
    ]
    assert store.garbage(run.id)[0].line == b"\x00\xff not json"


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_from_its_start(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED, SUBMITTING)
    append(metrics(run), b'{"t":3,"step":1}\n', b'{"t":4,"step":2}\n')
    assert read_again(store, run).state == "pending"
    journal(run).write_bytes(CREATED)
    assert read_again(store, run).state == "created"
    append(journal(run), SUBMITTING)
    metrics(run).write_bytes(b'{"t":3,"step":1}\n')
    assert read_again(store, run).step == 1


def test_a_line_without_end_does_not_hold_up_what_follows(
    store: Store, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_files, "LINE_LIMIT", 64)
    append(journal(run), b"x" * 200 + b"\n", b'{"t":1,"kind":"created","name":"n"}\n')
    assert read_again(store, run).name == "n"
    assert store.garbage(run.id) != []


def test_what_trackers_have_is_remembered_even_when_everything_is_read_again(store: Store) -> None:
    offsets = {"attempts/job.0/metrics.jsonl": 5}
    sent = [
        Sent("mlflow", "sqlite:///x", "run-1", offsets, 3, {"until": 7.5, "reach": 4, "from": [1, 5]}, 7),
        Sent("csv", "file:///y", revision=8, refused=["train//loss"], problem="the disk is full", since=9.5),
    ]
    with store.begin() as transaction:
        for each in sent:
            transaction.set_sent(RUN_ID, each)
    assert store.sent() == {RUN_ID: {each.tracker: each for each in sent}}
    with store.begin() as transaction:
        transaction.clear()
    assert store.sent([RUN_ID])[RUN_ID]["mlflow"] == sent[0]


def test_a_transaction_that_fails_leaves_nothing(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED)

    def fail() -> None:
        with store.begin() as transaction:
            ingest(transaction, [run], dead=False)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.load(run.id) is None
    assert store.ask(lambda db: queries.offsets(db, [run.id])) == {}


def test_a_run_is_settled_only_when_it_has_ended_and_its_processes_are_gone(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED, SUBMITTING)
    end = run.attempts / "job.0" / "node-0.jsonl"
    append(end, encode(3.0, "agent", {"node": 0, "nodes": 1, "host": "h", "attempt": 1}))
    read_again(store, run, dead=True)
    assert not store.listed()[run.id].settled
    append(end, encode(4.0, "end", {"cause": "completed", "reason": "", "failed_at": None, "failures": []}))
    read_again(store, run, dead=False)
    assert not store.listed()[run.id].settled
    with store.begin() as transaction:
        transaction.settle({run.id: (5, 6)})
    assert (store.index()[run.id].settled, store.index()[run.id].scanned) == (True, (5, 6))


def saved(step: int, at: float, **more: object) -> bytes:
    path = f"checkpoints/step-{step}"
    return encode(at, "saved", {"step": step, "path": path, "bytes": 10 * step, "seconds": 2.5, "saved_at": at, **more})


REFUSED = [
    encode(3.0, "agent", {"node": 1, "nodes": 2, "host": "n1", "attempt": 1, "executor": "slurm"}),
    encode(
        4.0,
        "preflight",
        {
            "blamed": True,
            "findings": [{"check": "clock", "status": "fail", "summary": "5 s ahead", "evidence": {"offset_ms": 5000}}],
        },
    ),
]


def test_what_a_run_says_against_nodes_is_kept_once_with_its_evidence_and_comes_back_with_a_rebuild(
    store: Store, run: RunDir
) -> None:
    append(journal(run), CREATED, SUBMITTING)
    append(run.attempts / "job.0" / "node-1.jsonl", *REFUSED)
    read_again(store, run)
    before = read_again(store, run)
    [entry] = store.ledger()
    assert (entry.host, entry.run_id, entry.attempt_key, entry.attempt) == ("n1", run.id, "job.0", 1)
    assert (list(entry.checks), entry.reason, entry.evidence, entry.seen_at) == (
        ["clock"],
        "clock: 5 s ahead",
        {"clock": {"offset_ms": 5000}},
        4.0,
    )
    assert before.attempts[0].checks == {"n1": [{"check": "clock", "status": "fail", "summary": "5 s ahead"}]}
    with store.begin() as transaction:
        transaction.clear()
    assert store.ledger() == []
    assert read_again(store, run) == before
    assert store.ledger() == [entry]
    [event] = store.events(run.id, PreflightDone)
    assert event.payload.findings[0]["evidence"] == {"offset_ms": 5000}


def test_a_run_that_is_read_line_by_line_is_the_same_as_one_that_is_read_at_once(store: Store, run: RunDir) -> None:
    node, rank = run.attempts / "job.0" / "node-0.jsonl", run.attempts / "job.0" / "rank-0.jsonl"
    lines = [
        (journal(run), CREATED),
        (journal(run), SUBMITTING),
        (node, encode(3.0, "agent", {"node": 0, "nodes": 1, "host": "n0", "attempt": 1})),
        (rank, encode(4.0, "session", {"step": 0})),
        (rank, encode(5.0, "total", {"total_steps": 10})),
        (rank, saved(5, 7.0, stall_s=0.5, why="interval")),
        (metrics(run), b'{"t":8,"step":6,"metrics":{"loss":0.5}}\n'),
        (rank, encode(9.0, "pruned", {"path": "checkpoints/step-5", "step": 5, "why": "not kept"})),
        # A file system may show a file of another machine late: what it says lies before what is known.
        (journal(run), encode(8.5, "verified", {"path": "checkpoints/step-5", "step": 5, "reason": None})),
        (rank, encode(10.0, "save_failed", {"step": 8, "reason": "no space", "why": "interval"})),
        (node, encode(12.0, "end", {"cause": "crash", "reason": "x", "failed_at": 11.0, "failures": []})),
        (journal(run), encode(13.0, "submitting", {"submission": 2, "job_id": "job2", "attempt": 2, "by": "resume"})),
    ]
    states = []
    for path, line in lines:
        append(path, line)
        states.append(read_again(store, run).state)
    assert {"created", "pending", "running", "failed"} == set(states)
    line_by_line = store.load(run.id)
    assert line_by_line is not None
    assert store.listed()[run.id].checkpoint == line_by_line.checkpoint
    with open_engine(store.address).connect() as connection:
        query = f"SELECT kind, seconds FROM attempt_seconds WHERE run_id = '{run.id}' AND attempt = 1"
        spent = dict(map(tuple, connection.exec_driver_sql(query).all()))
    assert spent == line_by_line.attempts[0].spent
    with store.begin() as transaction:
        transaction.clear()
    assert read_again(store, run) == line_by_line


def test_what_an_open_run_is_built_from_is_dropped_when_it_has_ended(store: Store, run: RunDir) -> None:
    append(journal(run), CREATED, SUBMITTING)
    read_again(store, run)

    def kept() -> list[str]:
        with store.begin() as transaction:
            return list(transaction.ask(lambda db: queries.builder_facts(db, [run.id])))

    assert kept() == [run.id]
    append(journal(run), encode(3.0, "unstarted", {"submission": 0, "reason": "x"}), encode(4.0, "cancel", {}))
    assert read_again(store, run).state == "cancelled"
    assert kept() == []


def test_why_a_run_cannot_be_read_is_kept_whatever_bytes_are_in_a_path(store: Store, run: RunDir) -> None:
    path = os.fsdecode(b"1\xff\xfe.0")
    with store.begin() as transaction:
        transaction.set_unreadable(run.id, f"cannot read {path}")
    loaded = store.load(run.id)
    assert loaded.reason == r"cannot read 1\udcff\udcfe.0"
