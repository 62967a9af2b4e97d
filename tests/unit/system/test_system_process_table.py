"""What /proc says of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.system.process import Entry, descend, marked, name_of, pipe_of, program_of, read_entry, read_table

# Says that it is ready, and ends when its standard input does, so that it never outlives the test.
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
NOBODY = 2**30


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WAIT]
    environment = {**os.environ, "MARK_OF_THIS_TEST": "a=b\nc"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def entry(pid: int, parent: int) -> Entry:
    return Entry(pid, parent, session=1, start=pid, ended=False)


def test_a_process_is_seen_with_its_parent_and_its_session(child: subprocess.Popen[bytes]) -> None:
    child_entry = read_table()[child.pid]
    assert (child_entry.parent, child_entry.session, child_entry.ended) == (os.getpid(), child.pid, False)
    assert child_entry == read_entry(child.pid)


def test_a_process_that_has_ended_is_there_until_its_parent_has_looked(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child_entry = read_entry(child.pid)
    assert child_entry is not None
    assert (child_entry.ended, child_entry.session) == (True, child.pid)
    child.wait()
    assert read_entry(child.pid) is None


def test_descendants_come_after_their_parents() -> None:
    table = {each.pid: each for each in (entry(9, 5), entry(5, 2), entry(7, 5), entry(2, 1), entry(3, 1))}
    assert [each.pid for each in descend(table, 1)] == [2, 3, 5, 9, 7]
    assert descend(table, 9) == []


def test_processes_are_found_by_a_variable_that_they_were_started_with(child: subprocess.Popen[bytes]) -> None:
    assert marked(["MARK_OF_THIS_TEST"]) == {child.pid: {"MARK_OF_THIS_TEST": "a=b\nc"}}


def test_a_process_is_described_by_its_program_and_its_streams(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert program_of(child.pid) == Path(sys.executable).resolve().name
    assert name_of(child.pid)
    assert pipe_of(child.pid, 1) == str(Path(f"/proc/self/fd/{child.stdout.fileno()}").readlink())
    assert pipe_of(child.pid, 1) != pipe_of(child.pid, 0)
    assert (read_entry(NOBODY), program_of(NOBODY), name_of(NOBODY), pipe_of(NOBODY, 0)) == (None, "", "", None)
