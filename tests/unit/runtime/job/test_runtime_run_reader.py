"""What a run has been through, from its files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.job import run_reader
from slurmtrain.runtime.job.run_reader import last_step, read_run, with_restarts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folded = RunDir(tmp_path / "RUN")
    folded.journals.mkdir(parents=True)
    write(folded.journals / "submit.jsonl", "created", 1.0, name="x", executor="slurm")
    write(folded.journals / "submit.jsonl", "submitting", 2.0, submission=1, attempt=1, executor="slurm", requeue={})
    write(folded.journals / "submit.jsonl", "submitted", 3.0, submission=1, job_id="7")
    for node in range(2):
        agent_facts = {"node": node, "nodes": 2, "host": f"n{node}", "executor": "slurm", "submission": 1, "attempt": 1}
        write(folded.attempt("7", 0).node_journal(node), "agent", 4.0, **agent_facts)
    return folded


def write(path: Path, kind: str, at: float, /, **data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encode(at, kind, data))


def steps(run: RunDir, *numbers: int, restart: int = 0) -> Path:
    path = run.attempt("7", restart).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"t": 5.0, "step": step, "metrics": {"loss": 1}}) + "\n" for step in numbers))
    return path


def test_rank_0_of_every_round_is_heard_and_no_other_rank(run: RunDir) -> None:
    place = run.attempt("7", 0)
    write(place.path / "rank-0.jsonl", "session", 5.0, step=0)
    write(place.path / "rank-0.1.jsonl", "session", 6.0, step=4)
    write(place.path / "rank-1.jsonl", "session", 7.0, step=99)
    write(place.path / "rank-0.jsonl.old", "session", 8.0, step=99)
    write(place.node_journal(0), "restart", 5.5, round=1, members=[0, 1], cause="crash", why="w", lost=[])
    assert (read_run(run).attempts[0].round_step, len(read_run(run).attempts[0].restarts)) == (4, 1)


def test_what_cannot_be_read_is_passed_over(run: RunDir) -> None:
    with run.attempt("7", 0).node_journal(1).open("ab") as file:
        file.write(b'garbage\n{"t": 5.0, "kind": "end", "cau')
    (run.journals / "odd.jsonl").mkdir()
    odd = '{"step": 9}\n{"t": null, "step": 9}\n{"t": "x", "step": 9}\n'
    steps(run, 1).write_text(f'not json\n[1]\n{{"t": 5.0, "step": 2}}\n{odd}{{"t": 6.0, "st')
    assert read_run(run).attempts[0].last_step == 2


def test_the_end_of_a_long_file_is_enough(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "_TAIL_BYTES", 100)
    assert last_step(run.attempt("7", 0)) is None
    steps(run)
    assert last_step(run.attempt("7", 0)) is None
    steps(run, *range(1, 200))
    assert last_step(run.attempt("7", 0)) == 199


# --- earlier starts of a requeued job ---------------------------------------------------------------------------------


BEGIN = 1_000_000.0
HANDED = InterruptionStats(uptime_s=7.0, interruptions=1, grace_s=60.0)
AGENT = {"node": 0, "nodes": 4, "host": "n0", "executor": "slurm"}


@pytest.fixture
def requeued(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "0123456789")


def start(run: RunDir, restart: int, *events: tuple[str, dict[str, Any]], lasted: float = 100.0) -> AttemptDir:
    """A start of job 7 that began, said this, and whose files were last written after so many seconds."""
    attempt = run.attempt("7", restart)
    attempt.path.mkdir(parents=True)
    lines = [encode(BEGIN, "agent", AGENT), *(encode(BEGIN + 1, name, data) for name, data in events)]
    attempt.node_journal(0).write_bytes(b"".join(lines))
    attempt.metrics.write_text("{}\n")
    for path in attempt.path.iterdir():
        os.utime(path, (BEGIN + lasted, BEGIN + lasted))
    return attempt


def test_a_start_that_ended_without_a_word_was_interrupted(requeued: RunDir) -> None:
    start(requeued, 0)
    assert with_restarts(HANDED, start(requeued, 1)) == InterruptionStats(uptime_s=407.0, interruptions=2, grace_s=60.0)


def test_one_that_was_asked_to_stop_had_notice(requeued: RunDir) -> None:
    start(requeued, 0, ("end", {"cause": "cancelled", "signal": "SIGTERM"}))
    start(requeued, 1, ("end", {"cause": "preflight", "signal": None}), lasted=10.0)
    assert with_restarts(HANDED, start(requeued, 2)) == InterruptionStats(
        uptime_s=447.0, interruptions=1, announced=1, grace_s=60.0
    )


def test_what_the_last_save_cost_is_known(requeued: RunDir) -> None:
    first = start(requeued, 0)
    saves = [encode(BEGIN, "saved", {"path": "p", "stall_s": stall, "seconds": 10 * stall}) for stall in (0.5, 0.25)]
    first.rank_journal(0).write_bytes(b"".join(saves))
    start(requeued, 1)
    history = with_restarts(InterruptionStats(stall_s=9.0, save_s=9.0), start(requeued, 2))
    assert (history.stall_s, history.save_s) == (0.25, 2.5)


def test_a_start_of_which_nothing_is_left_changes_nothing(requeued: RunDir) -> None:
    requeued.attempt("7", 1).path.mkdir(parents=True)
    (requeued.attempt("7", 1).node_journal(0)).write_bytes(b"\x00 torn")
    assert with_restarts(HANDED, start(requeued, 3)) == HANDED
