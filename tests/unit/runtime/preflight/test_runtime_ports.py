"""The port that training meets at."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations, islice
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.ports import RANKS, job_ports, listen_on_job_port, reserve_port, usable_ports

DEFAULT = usable_ports("32768\t60999\n", "\n")
JOBS = st.one_of(st.integers(1, 10**9).map(str), st.from_regex(r"[1-9][0-9]{0,6}_[0-9]{1,4}", fullmatch=True))
SALTS = ("", "bootstrap", RANKS)
SIDES = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(sorted)


def numbers(ranges: list[range]) -> list[int]:
    return [port for span in ranges for port in span]


# --- which ports there are --------------------------------------------------------------------------------------


@given(SIDES, st.lists(SIDES | st.integers(1, 65535).map(lambda port: [port, port]), max_size=6))
@example([1024, 65535], [])
@example([32768, 60999], [[1, 65535]])
@example([10001, 64600], [])
def test_no_usable_port_is_ephemeral_reserved_or_of_a_known_service(
    ephemeral: list[int], reserved: list[list[int]]
) -> None:
    text = ",".join(f"{low}-{high}" if low != high else str(low) for low, high in reserved)
    port_numbers = numbers(usable_ports(f"{ephemeral[0]}\t{ephemeral[1]}\n", text + "\n"))
    assert port_numbers == sorted(set(port_numbers))
    excluded = set(range(ephemeral[0], ephemeral[1] + 1)).union(*(range(low, high + 1) for low, high in reserved))
    services = {5000, 6379, 6817, 6818, 6819, 8265, 10001, 18515, 20049, 29400, 29500}
    assert set(port_numbers).isdisjoint(excluded | services)
    allowed = set(range(1024, 65536)) - excluded - services
    assert set(port_numbers) in (allowed, {port for port in allowed if port >= 10000})


@given(st.text(), st.text())
def test_any_text_gives_ports_that_a_user_may_bind(ephemeral: str, reserved: str) -> None:
    assert all(1024 <= port < 65536 for port in numbers(usable_ports(ephemeral, reserved)))


def set_kernel_settings(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ephemeral: str | None, reserved: str | None
) -> None:
    """Have this machine say this of its ports; None is a file that is not there."""
    for name, text in (("ip_local_port_range", ephemeral), ("ip_local_reserved_ports", reserved)):
        if text is not None:
            (folder / name).write_text(text)
    monkeypatch.setattr(ports, "_PROC", folder)


def test_the_kernels_settings_are_respected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_kernel_settings(monkeypatch, tmp_path, "20000\t60999\n", "11000-12000\n")
    port_numbers = set(job_ports("7", 0)) | set(job_ports("7", 0, "x")) | set(job_ports("7", 0, RANKS))
    assert port_numbers == set(numbers(usable_ports("20000 60999", "11000-12000")))


# --- which one is first -----------------------------------------------------------------------------------------


@given(JOBS, st.integers(0, 100), st.sampled_from(SALTS))
def test_the_ports_of_a_start_are_the_same_each_time_and_no_port_comes_twice(job: str, restart: int, salt: str) -> None:
    port_numbers = list(job_ports(job, restart, salt, DEFAULT))
    assert port_numbers == list(job_ports(job, restart, salt, DEFAULT))
    share = len(numbers(DEFAULT)) / (4 if salt else 2)
    assert len(port_numbers) == len(set(port_numbers)) == pytest.approx(share, abs=1)


def test_the_first_port_of_a_job_never_changes() -> None:
    # Processes that have to meet compute it each by itself.
    assert [next(job_ports("123_4", restart, ranges=DEFAULT)) for restart in (0, 1)] == [10781, 10881]


@given(JOBS, st.integers(0, 1000), st.sampled_from(SALTS))
def test_consecutive_restarts_try_different_ports(job: str, restart: int, salt: str) -> None:
    own_ports, other_ports = (set(islice(job_ports(job, span, salt, DEFAULT), 50)) for span in (restart, restart + 1))
    assert own_ports.isdisjoint(other_ports)


@given(JOBS, JOBS, st.integers(0, 50), st.integers(0, 50), st.integers(4, 300))
def test_with_another_salt_there_are_other_ports(
    job: str, other_job: str, restart: int, other_restart: int, count: int
) -> None:
    few = [range(10000, 10000 + count)]
    for salt, other in combinations(SALTS, 2):
        assert set(job_ports(job, restart, salt, few)).isdisjoint(job_ports(other_job, other_restart, other, few))


# --- reserving --------------------------------------------------------------------------------------------------


def test_a_reserved_port_is_free_for_the_process_it_is_meant_for_and_for_no_other_reservation() -> None:
    with reserve_port("995", 0) as first, reserve_port("995", 0) as second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] != port
        # What it is meant for: a store of torch, in a process that does not know of the reservation.
        store = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=30))
        assert store.port == port
        with pytest.raises(OSError, match="in use"):
            ports.reserve(port)


# --- listening --------------------------------------------------------------------------------------------------


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


@pytest.fixture
def free_ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the pool be four free ports, which the kernel gives to no connection of another test meanwhile."""
    port_numbers = sorted(islice(filter(is_free, job_ports(f"tests of {os.getpid()}", 0)), 4))
    monkeypatch.setattr(ports, "usable_ports", lambda *_: [range(port, port + 1) for port in port_numbers])
    return port_numbers


def test_the_port_of_a_socket_that_was_closed_with_a_connection_is_free_again(free_ports: list[int]) -> None:
    with listen_on_job_port("127.0.0.1", "1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            accepted, _ = listener.accept()
            accepted.close()  # this side closes first, and so is the one to wait
            assert client.recv(1) == b""
    with listen_on_job_port("127.0.0.1", "1", 0) as listener:
        assert listener.getsockname()[1] == port


def test_a_port_in_use_is_skipped(free_ports: list[int]) -> None:
    first, second = job_ports("1", 0)
    with socket.create_server(("127.0.0.1", first)), listen_on_job_port("127.0.0.1", "1", 0) as listener:
        assert listener.getsockname()[1] == second


def test_it_is_an_error_if_there_is_no_port_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "usable_ports", lambda *_: [])
    with pytest.raises(LaunchError, match=r"cannot listen on 10\.0\.0\.1: there is no port to try \(every port is"):
        listen_on_job_port("10.0.0.1", "1", 0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EADDRNOTAVAIL, "not here"), "cannot listen on 10.0.0.1: node3 has no such address"),
        (OSError(errno.EAFNOSUPPORT, "x"), "cannot listen on 10.0.0.1: Address family not supported by protocol"),
        (socket.gaierror(-2, "Name or service not known"), "cannot listen on 10.0.0.1: Name or service not known"),
        (OSError("odd"), "cannot listen on 10.0.0.1: odd"),
    ],
)
def test_an_error_that_another_port_would_not_change_is_raised_at_once(
    monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    attempts = []

    def refuse(address: tuple[str, int], **_: object) -> socket.socket:
        attempts.append(address[1])
        raise error

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(socket, "gethostname", lambda: "node3")
    with pytest.raises(LaunchError) as raised:
        listen_on_job_port("10.0.0.1", "1", 0)
    assert str(raised.value) == message
    assert len(attempts) == 1


_LISTENER = """
import sys
from slurmtrain.runtime.preflight.ports import listen_on_job_port
with listen_on_job_port("127.0.0.1", "993", 0) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_two_processes_that_listen_for_the_same_job_get_different_ports() -> None:
    command = [sys.executable, "-c", _LISTENER]
    with ExitStack() as stack:
        running = []
        for _ in range(2):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            running.append(process)
        port_numbers = [int(process.stdout.readline()) for process in running if process.stdout]
        assert len(set(port_numbers)) == 2
        assert set(port_numbers) <= set(islice(job_ports("993", 0), 50))


def test_the_module_needs_the_standard_library_only() -> None:
    code = "import sys, slurmtrain.runtime.preflight.ports; print(*sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names = set(completed.stdout.split())
    assert {name for name in names if name.startswith("slurmtrain")} == {
        "slurmtrain",
        "slurmtrain.version",
        "slurmtrain.errors",
        "slurmtrain.runtime",
        "slurmtrain.runtime.preflight",
        "slurmtrain.runtime.preflight.ports",
    }
    assert names.isdisjoint({"torch", "numpy", "psutil", "yaml", "sqlalchemy", "asyncio"})
