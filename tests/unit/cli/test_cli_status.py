"""What ``status`` prints on a terminal and elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.preloaded import shared
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
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm"}
    called = shared().call("--runs", str(root), command, *arguments, cwd=root, env=environment, stdout="terminal",
                           stderr="/dev/null", size=(40, columns))  # fmt: skip
    assert called.code == 0, called.stdout
    return re.sub(r"\x1b\[[0-9;]*m", "", called.stdout).splitlines()


@pytest.mark.parametrize("columns", [60, 140])
def test_each_run_is_a_line_that_fits_those_that_may_still_change_first_then_the_newest(
    root: Path, columns: int
) -> None:
    lines = on_a_terminal(root, columns)
    assert [line.split()[0] for line in lines[1:]] == ["0000000002", "0000000003", "0000000001"]
    assert max(map(len, lines)) <= columns
    assert all(state in "\n".join(lines) for state in STATES.values())
