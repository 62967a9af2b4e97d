"""The lease of a run: one attempt of one submission has it, and whatever came before is fenced off."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.job.lease import (
    acquire,
    claim_restart,
    close,
    ended_as,
    grant,
    granted_to,
    holds,
    kill_leftovers,
    read_claim,
    release_claim,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "0123456789")
    for job in ("1", "2"):
        run.attempt(job, 0).path.mkdir(parents=True)
    return run


def test_a_run_that_was_never_submitted_has_no_lease(run: RunDir) -> None:
    assert granted_to(run) is None
    assert not holds(run.attempt("7", 0))
    assert not acquire(run.attempt("7", 0), 1)


@pytest.mark.parametrize("job", ["12_3", "local-abc", "a.b"])
def test_any_job_id_can_hold_a_lease(run: RunDir, job: str) -> None:
    grant(run.submission(1))
    assert acquire(run.attempt(job, 2), 1)
    assert holds(run.attempt(job, 2))
    assert not acquire(run.attempt(job, 1), 1)
    # By number, not by spelling.
    assert acquire(run.attempt(job, 10), 1)
    assert not acquire(run.attempt(job, 9), 1)


def test_an_unreadable_lease_raises(run: RunDir) -> None:
    run.lease.write_text("{")
    with pytest.raises(PathError, match=r"lease\.json"):
        holds(run.attempt("7", 0))


moves = st.tuples(st.sampled_from(["grant", "claim"]), st.integers(1, 3), st.integers(0, 3))


@given(st.lists(moves, max_size=12))
def test_the_lease_only_ever_goes_forward(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    run = RunDir(tmp_path_factory.mktemp("lease"))
    current, holder = 0, -1  # the submission, and the restart of its job that has claimed it
    for move, submission, restart in steps:
        attempt = run.attempt(str(submission), restart)
        if move == "grant":
            # Commands give each submission a number of its own, and grant it once.
            if submission > current:
                grant(run.submission(submission))
                current, holder = submission, -1
        else:
            may = submission == current and restart >= holder
            assert acquire(attempt, submission) is may
            holder = restart if may else holder
        held = [(s, r) for s in range(1, 4) for r in range(4) if holds(run.attempt(str(s), r))]
        assert held == ([(current, holder)] if holder >= 0 else [])
        assert granted_to(run) == (current or None)


# --- runs that are over ---------------------------------------------------------------------------------------------


def test_the_final_state_is_known_to_the_submission_that_ended_the_run(run: RunDir) -> None:
    grant(run.submission(1))
    assert ended_as(run, 1) is None
    assert acquire(run.attempt("7", 0), 1)
    close(run, 1, "completed")
    assert ended_as(run, 1) == "completed"
    assert ended_as(run, 2) is None
    # What it saves until its end may still be published.
    assert holds(run.attempt("7", 0))
    # Another submission opens the run again, and the earlier one cannot close it.
    grant(run.submission(2))
    close(run, 1, "completed")
    assert (ended_as(run, 1), ended_as(run, 2)) == (None, None)


def test_a_run_that_is_closed_while_its_job_begins_stays_closed(run: RunDir) -> None:
    grant(run.submission(1))
    close(run, None, "cancelled")
    assert acquire(run.attempt("7", 0), 1)
    assert ended_as(run, 1) == "cancelled"


# --- who starts it again --------------------------------------------------------------------------------------------


def test_exactly_one_of_many_processes_gets_a_claim(run: RunDir) -> None:
    together, won = threading.Barrier(20), []

    def try_it(number: int) -> None:
        together.wait()
        if claim_restart(run.attempt("7", 0), "submission", {"submission": number}):
            won.append(number)

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    record = read_claim(run.attempt("7", 0), "submission")
    assert record is not None
    assert record["submission"] == winner
    # Nothing else is left lying there.
    assert [path.name for path in run.claims.iterdir()] == ["7.0.submission.json"]


def test_a_claim_that_was_released_can_be_made_again(run: RunDir) -> None:
    attempt = run.attempt("7", 0)
    assert not release_claim(attempt, "submission")
    assert claim_restart(attempt, "submission", {"submission": 1})
    assert release_claim(attempt, "submission")
    assert not release_claim(attempt, "submission")
    assert read_claim(attempt, "submission") is None
    assert claim_restart(attempt, "submission", {"submission": 2})


# --- what the ranks of a killed agent have left behind ----------------------------------------------------------------


@pytest.fixture
def sleepers(run: RunDir) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A process of each of two attempts, one that names the run differently, one of another run, and one of none."""
    other_name = run.path.parent.parent / "link"
    other_name.symlink_to(run.path.parent)
    places = {
        "first": run.attempt("1", 0).path,
        "second": run.attempt("2", 0).path,
        "renamed": other_name / run.path.name / "attempts" / "1.0",
        "foreign": run.path.parent / "another" / "attempts" / "1.0",
        "none": None,
    }
    started = {
        name: subprocess.Popen(
            ["sleep", "1000"],
            env={**os.environ, **({} if place is None else {"SLURMTRAIN_ATTEMPT_DIR": str(place)})},
            start_new_session=True,
        )
        for name, place in places.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_those_of_other_attempts_are_killed_and_those_of_this_one_left_alone(
    run: RunDir, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    killed = kill_leftovers(run, except_of=run.attempt("2", 0))
    ended = {name for name, process in sleepers.items() if process.poll() is not None}
    assert ended == {"first", "renamed"}
    assert sorted(killed) == sorted(f"sleep (pid {sleepers[name].pid})" for name in ended)
    assert kill_leftovers(run, except_of=run.attempt("2", 0)) == []


def test_a_run_whose_directory_was_deleted_can_still_be_cleaned_up(
    run: RunDir, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    import shutil

    shutil.rmtree(run.path)
    kill_leftovers(run)
    assert {name for name, process in sleepers.items() if process.poll() is not None} == {"first", "second"}
