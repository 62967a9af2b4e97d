"""How agents find node 0: by what they were told, or else by a file that node 0 leaves."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.errors import LaunchError
from slurmtrain.model.run.layout import AttemptDir, RunsRoot
from slurmtrain.runtime.environment.node import CoordinatorEndpoints, pop_coordinator_endpoints
from slurmtrain.runtime.preflight import entry, ports
from slurmtrain.runtime.preflight.connections import Endpoint, ParticipantConnections, connect_to_coordinator
from slurmtrain.runtime.preflight.entry import listen_for_participants, watch_endpoints
from slurmtrain.runtime.preflight.ports import listen, listen_anywhere
from slurmtrain.system.files import read_json

SECRET = bytes(range(32))
LONG_S = 60.0


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunsRoot(tmp_path).run("r-1").attempt("7", 0)
    attempt.path.mkdir(parents=True)
    return attempt


@pytest.fixture
def free_port() -> int:
    """Not one of those that the kernel gives to whoever asks for any, meanwhile too."""
    for port in ports.job_ports(f"{os.getpid()} {time.monotonic_ns()}", 0):
        with suppress(OSError), listen_anywhere(port):
            return port
    raise AssertionError("no port is free")


class Reads:
    """Counts how often the file is looked for, and says what time it is."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 1000.0

    def read(self, path: Path) -> dict[str, Any] | None:
        self.count += 1
        return read_json(path)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    monkeypatch.setattr(entry, "read_json", reads.read)
    monkeypatch.setattr(entry, "time", reads)
    return reads


def listen_and_close(
    attempt: AttemptDir,
    exported: CoordinatorEndpoints | None = None,
    addresses: Sequence[str] = ("10.0.0.1", "10.1.0.1"),
) -> tuple[int, bytes, dict[str, Any]]:
    """The port and the secret that node 0 took, and what its file says."""
    listener, secret = listen_for_participants(attempt, "7", 0, exported, addresses)
    with listener:
        content = read_json(attempt.rendezvous)
        assert content is not None
        return int(listener.getsockname()[1]), secret, content


# --- node 0's part ----------------------------------------------------------------------------------------------


def test_node_0_listens_on_the_exported_port_and_writes_a_file_with_the_same_endpoints(
    attempt: AttemptDir, free_port: int
) -> None:
    port, secret, content = listen_and_close(attempt, CoordinatorEndpoints(("10.0.0.1",), free_port, SECRET))
    assert (port, secret) == (free_port, SECRET)
    assert content == {"addresses": ["10.0.0.1", "10.1.0.1"], "port": free_port, "secret": SECRET.hex()}


def test_only_the_owner_can_read_the_secret(attempt: AttemptDir) -> None:
    umask = os.umask(0)
    try:
        listen_and_close(attempt)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(attempt.rendezvous.stat().st_mode) == 0o600
    assert [path.name for path in attempt.path.iterdir()] == [attempt.rendezvous.name]


def test_a_port_in_use_is_replaced_and_the_file_has_the_new_one(attempt: AttemptDir, free_port: int) -> None:
    with listen_anywhere(free_port):
        port, secret, content = listen_and_close(attempt, CoordinatorEndpoints(("10.0.0.1",), free_port, SECRET))
    assert port != free_port
    assert content["port"] == port
    assert secret == SECRET
    assert port in itertools.islice(ports.job_ports("7", 0, salt="bootstrap"), 50)


def test_nodes_on_one_machine_are_not_reached_from_elsewhere(attempt: AttemptDir) -> None:
    listener, _ = listen_for_participants(attempt, "7", 0, None, ["127.0.0.1"])
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.8.0.1", listener.getsockname()[1]), timeout=LONG_S)


def test_it_is_an_error_if_no_port_is_free(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_anywhere(0) as occupied:
        port = int(occupied.getsockname()[1])
        monkeypatch.setattr(ports, "job_ports", lambda *_, salt: itertools.repeat(port))
        with pytest.raises(LaunchError, match=r"none of 50 ports is free on .*: .*in use"):
            listen_for_participants(attempt, "7", 0, None, ["10.0.0.1"])
    assert not attempt.rendezvous.exists()


# --- the others' part -------------------------------------------------------------------------------------------

EXPORTED = CoordinatorEndpoints(("10.0.0.1", "10.1.0.1"), 4711, SECRET)
EXPORTED_ENDPOINTS = [Endpoint("10.0.0.1", 4711, SECRET), Endpoint("10.1.0.1", 4711, SECRET)]


def test_the_file_is_read_now_and_then_if_the_exported_endpoints_do_not_work(attempt: AttemptDir, reads: Reads) -> None:
    known_endpoints = watch_endpoints(attempt, EXPORTED)
    reads.now += 3.1
    for _ in range(25):
        assert known_endpoints() == EXPORTED_ENDPOINTS
        reads.now += 0.1
    assert 4 <= reads.count <= 6
    port, _, _ = listen_and_close(attempt, EXPORTED, ["10.0.0.1", "10.9.0.1"])
    assert port == 4711
    reads.now += 0.6
    count = reads.count
    for _ in range(3):
        assert known_endpoints() == [*EXPORTED_ENDPOINTS, Endpoint("10.9.0.1", 4711, SECRET)]
        reads.now += 10
    assert reads.count == count + 1


def test_without_exported_endpoints_the_file_is_read_at_each_call_until_it_exists(
    attempt: AttemptDir, reads: Reads
) -> None:
    known_endpoints = watch_endpoints(attempt, None)
    assert [known_endpoints(), known_endpoints()] == [[], []]
    assert reads.count == 2
    port, secret, _ = listen_and_close(attempt, None, ["10.0.0.1"])
    assert [known_endpoints(), known_endpoints()] == [[Endpoint("10.0.0.1", port, secret)]] * 2
    assert reads.count == 3


@pytest.mark.parametrize("exported", [True, False])
@pytest.mark.parametrize("occupied", [True, False])
async def test_a_participant_finds_node_0(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, exported: bool, occupied: bool, free_port: int
) -> None:
    monkeypatch.setattr(entry, "_EXPORTED_ONLY_S", 0.1)
    exported = CoordinatorEndpoints(("127.0.0.1",), free_port, SECRET) if exported else None

    # Somebody who has taken the port for loopback alone, and says nothing.
    other = listen("127.0.0.1", free_port) if occupied else None
    finding = asyncio.create_task(connect_to_coordinator(watch_endpoints(attempt, exported), 1, LONG_S))
    await asyncio.sleep(0)
    listener, secret = listen_for_participants(attempt, "7", 0, exported, ["127.0.0.1", "127.8.0.1"])
    coordinator = ParticipantConnections(secret, 2)
    await coordinator.listen(listener)
    participant, received_secret = await finding
    assert received_secret == secret
    await participant.exchange_clock_stamps(LONG_S)
    await participant.close()
    await coordinator.close()
    if other is not None:
        other.close()


# --- what the batch script exports ------------------------------------------------------------------------------


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """This process's variables, of which those of an invitation are set to these."""
    variables = CoordinatorEndpoints(("10.0.0.1", "fd00::1"), 4711, SECRET).variables()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield variables
    for name in variables:
        assert name not in os.environ


def test_exported_endpoints_are_removed_from_the_environment(environ: dict[str, str]) -> None:
    assert pop_coordinator_endpoints() == CoordinatorEndpoints(("10.0.0.1", "fd00::1"), 4711, SECRET)
    assert pop_coordinator_endpoints() is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [*((0, text) for text in ("", "port 10.0.0.1", "4711", "4711.5 10.0.0.1")), (1, ""), (1, "no hex")],
)
def test_exported_endpoints_that_cannot_be_read_are_ignored(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, variable: int, text: str
) -> None:
    monkeypatch.setenv(list(environ)[variable], text)
    assert pop_coordinator_endpoints() is None
