"""A job that Slurm has put back finds in its run's directory what its earlier starts have seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.job.run_reader import with_restarts

BEGIN = 1_000_000.0
HANDED = InterruptionStats(uptime_s=7.0, interruptions=1, grace_s=60.0)
AGENT = {"node": 0, "nodes": 4, "host": "n0", "executor": "slurm"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
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


def test_the_first_start_of_a_job_knows_what_was_handed_over(run: RunDir) -> None:
    assert with_restarts(HANDED, start(run, 0)) == HANDED


def test_a_start_that_ended_without_a_word_was_interrupted(run: RunDir) -> None:
    start(run, 0)
    assert with_restarts(HANDED, start(run, 1)) == InterruptionStats(uptime_s=407.0, interruptions=2, grace_s=60.0)


def test_one_that_was_asked_to_stop_had_notice(run: RunDir) -> None:
    start(run, 0, ("end", {"cause": "cancelled", "signal": "SIGTERM"}))
    start(run, 1, ("end", {"cause": "preflight", "signal": None}), lasted=10.0)
    assert with_restarts(HANDED, start(run, 2)) == InterruptionStats(
        uptime_s=447.0, interruptions=1, announced=1, grace_s=60.0
    )


def test_what_the_last_save_cost_is_known(run: RunDir) -> None:
    first = start(run, 0)
    saves = [encode(BEGIN, "saved", {"path": "p", "stall_s": stall, "seconds": 10 * stall}) for stall in (0.5, 0.25)]
    first.rank_journal(0).write_bytes(b"".join(saves))
    start(run, 1)
    history = with_restarts(InterruptionStats(stall_s=9.0, save_s=9.0), start(run, 2))
    assert (history.stall_s, history.save_s) == (0.25, 2.5)


def test_a_start_of_which_nothing_is_left_changes_nothing(run: RunDir) -> None:
    run.attempt("7", 1).path.mkdir(parents=True)
    (run.attempt("7", 1).node_journal(0)).write_bytes(b"\x00 torn")
    assert with_restarts(HANDED, start(run, 3)) == HANDED


def test_other_jobs_of_the_run_are_in_the_registry_already(run: RunDir) -> None:
    start(run, 0)
    other = run.attempt("8", 0)
    other.path.mkdir(parents=True)
    assert with_restarts(HANDED, other) == HANDED
