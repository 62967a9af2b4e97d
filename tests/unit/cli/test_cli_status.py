"""What ``status`` prints on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

STATES = {"0000000001": "completed", "0000000002": "running", "0000000003": "cancelled"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    workspace = make_workspace(tmp_path / "runs")
    for run_id, state in STATES.items():
        sim = SimulatedRun(workspace.root.run(run_id), spec={"name": f"a-long-name-of-an-experiment-{run_id[-1]}"})
        sim.submitted().started()
        if state == "completed":
            sim.ended("completed")
        elif state == "cancelled":
            sim.cancel().ended("cancelled")
    return tmp_path / "runs"


def on_a_terminal(root: Path, columns: int, *arguments: str, command: str = "status") -> list[str]:
    """What a command with these arguments draws on a terminal of 40 lines, without colours."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, columns))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm"}
    argv = [sys.executable, "-m", "slurmtrain", "--runs", str(root), command, *arguments]
    with subprocess.Popen(argv, stdout=terminal, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(terminal)
        drawn = b""
        while chunk := _read(controller):
            drawn += chunk
        assert process.wait() == 0
    os.close(controller)
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn.decode()).splitlines()


def _read(controller: int) -> bytes:
    try:
        return os.read(controller, 4096)
    except OSError:  # EIO: the process has closed the terminal
        return b""


def test_runs_that_may_still_change_come_first_then_the_newest(root: Path) -> None:
    ids = [line.split()[0] for line in on_a_terminal(root, 80)[1:]]
    assert ids == ["0000000002", "0000000003", "0000000001"]


@pytest.mark.parametrize("columns", [60, 140])
def test_each_run_is_one_line_that_fits_on_the_terminal(root: Path, columns: int) -> None:
    lines = on_a_terminal(root, columns)
    assert len(lines) == 1 + len(STATES)
    assert max(map(len, lines)) <= columns
    assert all(state in "\n".join(lines) for state in STATES.values())
