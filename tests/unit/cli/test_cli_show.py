"""What ``show`` prints for a person."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.preloaded import Preloaded
from helpers.screens import screen
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.cli.describe import describe_git_state
from slurmtrain.cli.status_commands import _print_attempt
from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.shared.run_details import attempt_json


def state(rank: int, idle_s: float, letter: str = "S") -> dict[str, Any]:
    return RankState(rank=rank, node=0, step=5, phase=Phase.TRAINING, idle_s=idle_s, state=letter).to_dict()


def printed(capsys: pytest.CaptureFixture[str], **fields: Any) -> list[str]:
    attempt = Attempt(number=1, job_id="7", restart=0, state="failed", cause="hang", **fields)
    _print_attempt(attempt_json(attempt), measured=True, each_node=False)
    return capsys.readouterr().out.splitlines()


def test_an_attempt_that_was_held_up_says_by_what(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        spent={"queue": 12.0, "train": 61.0},
        restarts=[{"at": 1.0, "cause": "crash", "reached": 5, "why": "rank 0 exited with 3"}],
        hangs=[{"at": 2.0, "ranks": [state(0, 65.0), state(1, 60.0, "T")]}],
        stragglers=[{"at": 3.0, "rank": 2, "host": "n1", "ratio": 2.0, "own_s": 0.2, "median_s": 0.1, "step": 9}],
        evidence={"xids": [79]},
    )
    assert lines[2:] == [
        "  time      queue 12s, train 1m01s",
        "  in place  crash after step 5: rank 0 exited with 3",
        "  hang      rank 1 (node 0) is stopped by a signal (process state T) after step 5 (no progress for 1m00s)",
        "  slow      rank 2 on n1 was 2 times as slow as others at step 9: 200 ms of its own per step, the median "
        "is 100 ms",
        "  evidence  xids 79",
    ]


def test_a_failure_without_lines_of_its_log_and_a_revision_without_more_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys)[2:] == printed(capsys, failures=[{"rank": 0}])[2:] == []
    assert describe_git_state({"commit": "0123456789abcdef"}) == "0123456789ab"


GOLDEN = Path(__file__).resolve().parents[2] / "golden"
AGAIN = "0123456788"
NODES = 256
HOSTS = [f"tb{number}" for number in range(1, NODES + 1)]
NO_CLOCK = "its offset is not measured: no time service answers, and node 0 did not answer within 5 s"

LIMITS = "warn limits: 1024 open files (limit 4096)"


def preflight(run: SimulatedRun, node: int, restart: int) -> None:
    """What the agent of a node writes before the ranks start: 15 clocks are unknown, 3 disks fill up."""
    host, unknown = HOSTS[node], 240 <= node < 255
    offset = None if unknown else round(0.8 - 0.004 * node, 3)
    run.node("clock", node, restart, node=node, offset_ms=offset, bound_ms=0.02)
    clock = {"check": "clock", "status": "warn" if unknown else "pass", "summary": NO_CLOCK if unknown else "ok"}
    limits = {"check": "limits", "status": "warn", "summary": "1024 open files (limit 4096)"}
    space = {"check": "tmp", "status": "warn" if node < 3 else "pass", "summary": f"{2.5 + node} GB free (limit 10 GB)"}
    versions = {"check": "versions", "status": "pass", "summary": "Python 3.11.7, torch 2.13.0"}
    run.node("preflight", node, restart, node=node, status="warn", findings=[clock, limits, space, versions])
    interface = "ib0" if host == "tb9" else "hsn0"
    run.node("rendezvous", node, restart, node=node, master_addr="10.0.0.1", master_port=29500, interface=interface)


def attempt(run: SimulatedRun, restart: int) -> None:
    """An attempt that trains, and saves three times."""
    for node in range(NODES):
        run.started(restart, nodes=0).node("agent", node, restart, node=node, nodes=NODES, host=HOSTS[node],
                                           executor="slurm", submission=1, attempt=1 + restart)  # fmt: skip
        preflight(run, node, restart)
    network = {"name": "10.0.0.0/16", "kind": "ethernet", "speed_mbps": 200_000, "mtu": 9000, "proved": True}
    hosts = {host: "ib0" if host == "tb9" else "hsn0" for host in HOSTS}
    slow = {"name": "192.168.0.0/16", "kind": "ethernet", "speed_mbps": 1000, "mtu": 1500, "proved": None}
    networks = [{**network, "interfaces": hosts}, {**slow, "interfaces": dict.fromkeys(HOSTS, "eno1")}]
    excluded = [
        {"host": host, "interface": "docker0", "address": f"172.17.{node}.1", "why": "containers use it"}
        for node, host in enumerate(HOSTS)
    ]
    run.node("election", 0, restart, networks=networks, excluded=excluded, elected=0)
    run.node("workers", 0, restart, processes={})
    run.reached(300 * (restart + 1), restart, loss=0.25, accuracy=0.9375)
    for step in range(300 * restart + 100, 300 * restart + 400, 100):
        run.saved(step, restart, bytes=5 * 1024**3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    run = SimulatedRun(RunsRoot(path / "runs").run(RUN_ID), spec={"name": "gpt-wide"})
    run.submitted()
    attempt(run, 0)
    again = SimulatedRun(RunsRoot(path / "runs").run(AGAIN), spec={"name": "gpt-again"})
    again.submitted()
    for restart in range(4):
        attempt(again, restart)
        if restart < 3:
            again.ended("preempted", 0, restart, reason="Slurm preempted the job", signal="SIGTERM")
    return path


def show(commands: Preloaded, site: Path, columns: int, *arguments: str) -> list[str]:
    """What ``show`` draws on a terminal of this many columns."""
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    terminal = {"TERM": "xterm", "LANG": "C.UTF-8", "TZ": "UTC", "COLUMNS": str(columns), "LINES": "40"}
    environment = {**inherited, **terminal, "HOME": str(site), "SLURMTRAIN_RUNS": "runs"}
    called = commands.call("show", *arguments, cwd=site, env=environment, stdout="terminal")
    assert called.code == 0, called.stdout
    lines = screen(called.stdout.replace(str(site), "/home/me"), columns)
    # Before that there are warnings: no Slurm answers here.
    return lines[next(number for number, line in enumerate(lines) if line.startswith("run ")) :]


@pytest.mark.parametrize("columns", [60, 140])
def test_a_run_of_256_nodes_fits_on_a_screen(commands: Preloaded, site: Path, columns: int) -> None:
    lines = show(commands, site, columns, RUN_ID)
    assert len(lines) <= 45
    assert max(map(len, lines)) <= columns
    assert any("tb[1-256] (256 nodes)" in line for line in lines)
    assert sum("tb[241-255]" in line for line in lines) == 2


@pytest.mark.parametrize(("run", "page"), [(RUN_ID, "show-256-nodes"), (AGAIN, "show-256-nodes-4-attempts")])
def test_at_80_columns_it_is_as_kept(commands: Preloaded, site: Path, run: str, page: str) -> None:
    lines, golden = show(commands, site, 80, run), GOLDEN / f"{page}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text("".join(f"{line}\n" for line in lines))
    assert lines == golden.read_text().splitlines()


def test_each_node_is_a_row_where_that_is_asked_for(commands: Preloaded, site: Path) -> None:
    lines = show(commands, site, 200, RUN_ID, "--nodes")
    rows = [line for line in lines if line.split(maxsplit=1)[:1] in [[host] for host in HOSTS]]
    assert len(rows) == NODES
    assert rows[8].split() == ["tb9", "ib0", "+0.768", "ms", "±", "0.02", *LIMITS.split()]
    assert rows[250].split() == ["tb251", "hsn0", "not", "measured", *f"warn clock: {NO_CLOCK}; {LIMITS}".split()]


def documented(noun: str) -> set[str]:
    """The fields that docs/reference/json.md lists of RUN, ATTEMPT or CHECKPOINT."""
    page = (GOLDEN.parents[1] / "docs" / "reference" / "json.md").read_text()
    match = re.search(rf"^{noun} +(.*?)^(?:[A-Z]|```)", page, re.MULTILINE | re.DOTALL)
    fields = re.sub(r"\([^)]*\)|\{([^{}]|\{[^}]*\})*\}|\[[^\]]*\]", "", match[1])
    # Before those of one command alone stands its name.
    fields = re.sub(r"[,;]?\s+(show|status)[^:]*: ", ",", fields)
    return {field.strip() for field in fields.split(",")}


def test_the_page_about_json_lists_every_field_of_the_json(commands: Preloaded, site: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(site), "SLURMTRAIN_RUNS": "runs"}
    run = json.loads(commands.call("show", RUN_ID, "--json", cwd=site, env=environment).stdout)["run"]
    lists = {"attempts", "checkpoints"}
    assert documented("RUN") == set(run) - lists | {"user"}
    assert documented("ATTEMPT") == set(run["attempts"][0])
    assert documented("CHECKPOINT") == set(run["checkpoints"][0])
