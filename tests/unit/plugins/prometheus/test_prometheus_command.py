"""``slurmtrain metrics`` as typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers.workspaces import make_workspace

from slurmtrain.errors import UserError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus import metrics_command

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from helpers.metered_runs import write_metered_run


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = make_workspace(tmp_path / "runs")
    write_metered_run(workspace, ends=False)
    return workspace


def call(workspace: Workspace, *arguments: str) -> Result:
    words = [*arguments, "--runs", str(workspace.root.path)]
    result = CliRunner().invoke(metrics_command, words, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def test_metrics_are_printed_written_or_given_as_json(workspace: Workspace, tmp_path: Path) -> None:
    printed = call(workspace, "--label", "project=vision").stdout
    assert 'slurmtrain_run_steps{name="cnn",project="vision",run="0000000001",user="' in printed
    path = tmp_path / "ada.prom"
    assert call(workspace, "--textfile", str(path), "--no-runs").stdout == ""
    assert "slurmtrain_run_" not in path.read_text()
    answer: dict[str, Any] = json.loads(call(workspace, "--json").stdout)
    assert answer["schema"] == 1
    by_name = {metric["name"]: metric for metric in answer["metrics"]}
    assert by_name["slurmtrain_run_steps"]["samples"] == [
        {"labels": {"run": "0000000001", "name": "cnn"}, "value": 7.0}
    ]
    assert by_name["slurmtrain_queue_seconds"]["samples"][0]["count"] == 2


def test_a_label_may_have_what_only_python_takes_for_a_line_break(workspace: Workspace) -> None:
    printed = call(workspace, "--label", "project=a\u2028b").stdout
    lines = [line for line in printed.split("\n") if line and not line.startswith("#")]
    assert all("project=" in line and line.rpartition(" ")[2] for line in lines)


def test_the_dashboard_is_printed_as_it_is(workspace: Workspace) -> None:
    assert json.loads(call(workspace, "--dashboard").stdout)["uid"] == "slurmtrain"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "0"], "neither a port"),
        (["--serve", "here:x"], "neither a port"),
        (["--label", "run=1"], "uses the label"),
        (["--label", "9=1"], "NAME=VALUE"),
        (["--label", "__x=1"], "NAME=VALUE"),
        (["--serve", "9108", "--json"], "only one"),
        (["--textfile", "x.txt"], r"end in \.prom"),
    ],
)
def test_mistakes_are_named(workspace: Workspace, arguments: list[str], message: str) -> None:
    with pytest.raises((click.UsageError, UserError), match=message):
        call(workspace, *arguments)


def test_metrics_are_served_until_ctrl_c(workspace: Workspace) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", "--runs", str(workspace.root.path), "metrics", "--serve", free_port()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:
        address = server.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as response:
            assert b"slurmtrain_runs{" in response.read()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (0, "Ctrl-C ends it\n")


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
