"""``resume --failed``: which runs it would start, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.start_commands import resume_command
from slurmtrain.ops.shared.workspace import Workspace

FAILED, COMPLETED, CANCELLED, PRUNED = "0000000001", "0000000002", "0000000003", "0000000004"
SWEEP = "000000000z"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """The runs of a sweep, all of which are over."""
    workspace = make_workspace(tmp_path / "runs")
    for run_id in (FAILED, COMPLETED, CANCELLED, PRUNED):
        sim = SimulatedRun(workspace.root.run(run_id), spec={"name": "cnn"}, executor="local").created(sweep=SWEEP)
        sim.submitted().started()
        if run_id == FAILED:
            sim.crashed()
        elif run_id == CANCELLED:
            sim.cancel().ended("cancelled")
        elif run_id == PRUNED:
            sim.command("cancel", reason="pruned by the median pruner at step 5").ended("cancelled")
        else:
            sim.ended("completed")
    return workspace


def call(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(resume_command, [*arguments, "--runs", str(workspace.root.path)])


def test_a_dry_run_lists_those_that_have_failed_and_none_that_a_search_has_pruned(workspace: Workspace) -> None:
    assert FAILED in call(workspace, "--failed", SWEEP, "--dry-run").output
    listed = json.loads(call(workspace, "--failed", SWEEP, "--dry-run", "--json").stdout)["runs"]
    assert [run["id"] for run in listed] == [FAILED]
    listed = json.loads(call(workspace, "--failed", SWEEP, "--cancelled", "--dry-run", "--json").stdout)["runs"]
    assert [run["id"] for run in listed] == [FAILED, CANCELLED]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--failed", SWEEP, "--from-start"),
        ("--failed", SWEEP, "--step", "5"),
        ("--failed", SWEEP, "--code", "now"),
        (SWEEP, "--dry-run"),
    ],
)
def test_options_that_exclude_each_other_are_refused(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    assert call(workspace, *arguments).exit_code == 2


def test_a_sweep_of_which_none_has_failed_is_refused_with_the_states_of_its_runs(workspace: Workspace) -> None:
    error = call(workspace, "--failed", COMPLETED, CANCELLED).exception
    assert "has failed: 1 cancelled, 1 completed" in str(error)
