"""Processes by identity, and what /proc shows of them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurmtrain.system.process import (
    Process,
    block_signals,
    descendants,
    established,
    has_loaded,
    identify,
    name_of,
    pipe_of,
    processes_with_argument,
    program_of,
    read_entry,
    sockets_of,
    this_process,
    variable_of,
    was_connected,
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
    command = [sys.executable, "-c", WAIT, "mark-of-this-test"]
    environment = {**os.environ, "MARK_OF_THIS_TEST": "a=b\nc"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
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
    zombie = read_entry(child.pid)
    assert zombie is not None
    assert (zombie.ended, zombie.session) == (True, child.pid)
    assert (process.alive(), identify(child.pid), process.send(signal.SIGTERM)) == (False, None, False)
    child.wait()
    assert (process.alive(), read_entry(child.pid), process.send(signal.SIGTERM)) == (False, None, False)


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


NOBODY = 2**30


def test_a_process_is_described_by_its_program_and_its_streams(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert program_of(child.pid) == Path(sys.executable).resolve().name
    assert name_of(child.pid)
    assert pipe_of(child.pid, 1) == str(Path(f"/proc/self/fd/{child.stdout.fileno()}").readlink())
    assert pipe_of(child.pid, 1) != pipe_of(child.pid, 0)
    assert (read_entry(NOBODY), program_of(NOBODY), name_of(NOBODY), pipe_of(NOBODY, 0)) == (None, "", "", None)


def test_both_ends_of_a_connection_are_seen_as_each_others() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as client:
                served, _ = listener.accept()
                with served:
                    connections, own = established(os.getpid()), sockets_of(os.getpid())
                    ends = [connections[os.fstat(each.fileno()).st_ino] for each in (client, served)]
                    assert {os.fstat(each.fileno()).st_ino for each in (client, served, listener)} <= own
                    assert ends[0] == ends[1][::-1]
                    assert os.fstat(listener.fileno()).st_ino not in connections


def test_a_socket_of_both_families_is_compared_as_one_of_ipv4() -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client,
        listener.accept()[0] as served,
    ):
        connections = established(os.getpid())
        ends = [connections[os.fstat(each.fileno()).st_ino] for each in (client, served)]
        assert ends[0] == ends[1][::-1]


def test_a_connection_is_remembered_for_a_while_and_a_listener_is_none() -> None:
    with contextlib.ExitStack() as listeners:
        # One of several: a connection of another test to the same port may be remembered still.
        several = [listeners.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(9)]
        listener = next(each for each in several if not was_connected(each.getsockname()[1]))
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as served:
            assert was_connected(port)
            client.close()
            served.close()
    assert was_connected(port)


def test_what_cannot_be_seen_is_nothing() -> None:
    gone = 2**22 + 1
    assert (established(gone), sockets_of(gone), has_loaded(gone, ["lib"]), variable_of(gone, "A")) == (
        {}, set(), False, None,
    )  # fmt: skip
    assert has_loaded(os.getpid(), ["/libc.so", os.path.basename(sys.executable)])  # noqa: PTH119
    assert variable_of(os.getpid(), "PATH")
