"""What the batch script tells all tasks of where node 0 will be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from slurmtrain.model.preflight.election import Candidate
from slurmtrain.runtime.environment.node import CoordinatorEndpoints, pop_coordinator_endpoints
from slurmtrain.runtime.preflight import ports
from slurmtrain.runtime.preflight.facts import interfaces


@pytest.fixture(autouse=True)
def _in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")


def set_addresses(monkeypatch: pytest.MonkeyPatch, addresses: Sequence[str], routes: dict[str, str | None]) -> None:
    """Give this machine these addresses, and these ways to elsewhere."""
    candidates = [Candidate(interface="eth0", address=address, prefix=24) for address in addresses]
    monkeypatch.setattr(interfaces, "find_candidates", lambda node: (candidates, []))
    monkeypatch.setattr(ports, "source_towards", routes.get)


def evaluate_announcement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CoordinatorEndpoints:
    """What a task learns after a shell has evaluated what is printed."""
    ports.announce_node_0()
    script = f"{capsys.readouterr().out}\nenv -0"
    shell = subprocess.run(["sh", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    for variable in shell.stdout.decode().split("\0"):
        name, _, value = variable.partition("=")
        if name.startswith("SLURMTRAIN_"):
            monkeypatch.setenv(name, value)
    endpoints = pop_coordinator_endpoints()
    assert endpoints is not None
    return endpoints


def test_all_addresses_are_exported_that_of_the_default_route_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_addresses(
        monkeypatch, ["10.1.0.1", "10.0.0.1", "fd01::1", "fd00::1"], {"192.0.2.1": "10.0.0.1", "2001:db8::1": "fd00::1"}
    )
    endpoints = evaluate_announcement(capsys, monkeypatch)
    assert endpoints.addresses == ("10.0.0.1", "fd00::1", "10.1.0.1", "fd01::1")
    assert len(endpoints.secret) == 32


def test_a_node_without_an_address_reports_why_it_exports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_addresses(monkeypatch, [], {})
    with pytest.raises(SystemExit, match="no network address that others could reach; they will look for a file"):
        ports.announce_node_0()
    assert capsys.readouterr().out == ""


def test_the_command_of_the_batch_script_works_on_this_machine() -> None:
    if not interfaces.find_candidates(0)[0]:
        pytest.skip("this machine has no network")
    shell = 'invitation="$("$0" -m slurmtrain.runtime.preflight.ports)" && eval "$invitation" && env'
    completed = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, check=True)
    exported = dict(
        line.partition("=")[::2] for line in completed.stdout.splitlines() if line.startswith("SLURMTRAIN_HOME")
    )
    port, *addresses = exported["SLURMTRAIN_HOME"].split()
    assert int(port) in range(1024, 65536)
    assert set(addresses) == {one.address for one in interfaces.find_candidates(0)[0]}
    assert len(bytes.fromhex(exported["SLURMTRAIN_HOME_SECRET"])) == 32
    assert completed.stderr == ""
