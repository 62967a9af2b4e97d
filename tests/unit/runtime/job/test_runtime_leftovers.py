"""What the ranks of a killed agent have left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.job.lease import find_leftovers, kill_leftovers


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "0123456789")
    for job in ("1", "2"):
        run.attempt(job, 0).path.mkdir(parents=True)
    return run


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


def test_processes_of_a_run_are_found_by_their_environment(
    run: RunDir, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    expected = {sleepers[name].pid for name in ("first", "second", "renamed")}
    assert {process.pid for process in find_leftovers(run)} == expected


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
