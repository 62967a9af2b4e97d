"""Processes by identity."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slurmtrain.system.process import (
    Process,
    block_signals,
    descendants,
    identify,
    processes_with_argument,
    this_process,
)

# Says that it is ready, and ends when its standard input does, so that it never outlives the test.
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
# Each line in one write: both processes have the same pipe.
PARENT = (
    "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', \"import os, sys; "
    "os.write(1, b'ready\\\\n'); sys.stdin.read()\"]); os.write(1, b'%d\\n' % child.pid); child.wait()"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, "mark-of-this-test"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def identity_of(process: subprocess.Popen[bytes]) -> Process:
    identity = identify(process.pid)
    assert identity is not None
    return identity


def test_this_process_lives_and_keeps_its_identity() -> None:
    assert this_process() == this_process()
    assert this_process().pid == os.getpid()
    assert this_process().alive() is True
    assert Process.from_dict(this_process().to_dict()) == this_process()
    assert identify(2**30) is None


def test_a_process_that_ended_is_gone_even_before_its_parent_has_looked(child: subprocess.Popen[bytes]) -> None:
    process = identity_of(child)
    assert process.alive() is True
    child.kill()
    # Waits for the end without taking it in: the process stays a zombie.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.alive() is False
    assert identify(child.pid) is None
    assert process.send(signal.SIGTERM) is False
    child.wait()
    assert process.alive() is False
    assert process.send(signal.SIGTERM) is False


def test_another_process_with_the_same_id_is_another_process(child: subprocess.Popen[bytes]) -> None:
    process = identity_of(child)
    for other in (replace(process, start=process.start - 1), replace(process, boot="an earlier boot")):
        assert other.alive() is False
        assert other.send(signal.SIGKILL) is False
    assert child.poll() is None


def test_a_process_of_another_machine_can_be_neither_judged_nor_reached(child: subprocess.Popen[bytes]) -> None:
    other = replace(identity_of(child), host="surely-another-host")
    assert other.alive() is None
    assert other.send(signal.SIGKILL) is False
    assert descendants(other) == []
    assert child.poll() is None


@pytest.mark.parametrize("can_hold", [True, False])
def test_a_signal_reaches_the_process_that_was_meant_also_where_the_kernel_cannot_hold_on_to_it(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, can_hold: bool
) -> None:
    def absent(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not can_hold:
        monkeypatch.setattr(os, "pidfd_open", absent)
    assert identity_of(child).send(signal.SIGTERM) is True
    assert child.wait() == -signal.SIGTERM


def test_descendants_are_found_and_the_dead_have_none() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert b"ready" in lines
        [grandchild] = [int(line) for line in lines - {b"ready"}]
        process = identity_of(parent)
        assert [child.pid for child in descendants(process)] == [grandchild]
        assert grandchild in [child.pid for child in descendants(this_process())]
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait()
        assert descendants(process) == []


def test_a_process_is_found_by_its_command_line(child: subprocess.Popen[bytes]) -> None:
    commands = {process.pid: command for process, command in processes_with_argument("mark-of-this-test")}
    assert b"mark-of-this-test" in commands[child.pid].split(b"\0")
    assert os.getpid() not in commands


def test_what_is_started_while_a_signal_is_blocked_has_it_blocked_and_this_process_has_not() -> None:
    look = ["awk", "/^SigBlk/ {print $2}", "/proc/self/status"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with block_signals((signal.SIGUSR1,)):
        mask = int(subprocess.run(look, capture_output=True, text=True, check=True).stdout, 16)
    assert mask & 1 << (signal.SIGUSR1 - 1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
