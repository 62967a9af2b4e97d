"""Which runs ``cancel`` ends, and what it asks and says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli import output
from slurmtrain.cli.watch_commands import cancel_command
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace

OLD, NEW, WIDE, COMPLETED = "0000000001", "0000000002", "0000000003", "0000000004"
NAMES = {OLD: "cnn", NEW: "cnn", WIDE: "cnn-wide", COMPLETED: "cnn"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Runs that were created and never started, which need nothing but a word to be cancelled; and one that ended."""
    workspace = make_workspace(tmp_path / "runs")
    for run_id, name in NAMES.items():
        sim = SimulatedRun(workspace.root.run(run_id), spec={"name": name}, executor="local").created(name=name)
        if run_id == COMPLETED:
            sim.submitted().started().ended("completed")
    return workspace


def call(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(cancel_command, [*arguments, "--runs", str(workspace.root.path)], standalone_mode=False)


def live(workspace: Workspace) -> set[str]:
    return {run_id for run_id, row in observe(workspace, ask_slurm=False).runs.index.items() if not row.ended}


def test_a_name_means_the_newest_run_and_the_others_that_go_on_are_told(workspace: Workspace) -> None:
    result = call(workspace, "cnn")
    assert live(workspace) == {OLD, NEW, WIDE}, result.output
    assert f"run {COMPLETED} had ended already: completed" in result.output
    assert f"not cancelled, and also named cnn: {OLD}, {NEW}" in result.output


def test_the_name_of_a_sweep_cancels_all_its_runs_and_of_many_the_first_are_listed(workspace: Workspace) -> None:
    swept = [f"00000001{number:02}" for number in range(30)]
    for run_id in swept:
        SimulatedRun(workspace.root.run(run_id), spec={"name": "cnn"}, executor="local").created(sweep="0000000099")
    result = call(workspace, "cnn", "--yes")
    assert live(workspace) == {OLD, NEW, WIDE}, result.output
    lines = result.output.splitlines()
    assert lines[:5] == [f"run {run_id} is cancelled: cancelled before it started" for run_id in swept[:5]]
    assert lines[5] == "and 25 more; -v lists all"
    assert "30 runs: 30 cancelled" in lines
    assert f"not cancelled, and also named cnn: {OLD}, {NEW}" in lines
    error = str(call(workspace, "cnn").exception)
    assert error.startswith("all 30 runs of sweep 0000000099 have ended; also called so, and not ended: ")


@pytest.mark.parametrize("word", ["cnn*", "--all"])
def test_a_pattern_or_all_means_those_that_have_not_ended(workspace: Workspace, word: str) -> None:
    assert COMPLETED not in call(workspace, word).output
    assert live(workspace) == set()


def test_a_sweep_of_which_every_run_has_ended_is_no_run_that_only_slurm_knows(workspace: Workspace) -> None:
    for run_id in ("0000000006", "0000000007"):
        sim = SimulatedRun(workspace.root.run(run_id), executor="local").created(sweep="0000000005")
        sim.submitted().ended("completed")
    assert "all 2 runs of sweep 0000000005 have ended" in str(call(workspace, "0000000005").exception)


@pytest.mark.parametrize("arguments", [(), ("cnn", "--all")])
def test_either_runs_or_all_are_named(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    assert "--all" in str(call(workspace, *arguments).exception)
    assert live(workspace) == {OLD, NEW, WIDE}


@pytest.mark.parametrize(("answer", "left"), [("n", {OLD, NEW, WIDE}), ("y", set())])
def test_on_a_terminal_it_asks_before_it_cancels_several(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, answer: str, left: set[str]
) -> None:
    monkeypatch.setattr(output, "can_ask", lambda: True)
    result = CliRunner().invoke(
        cancel_command, ["cnn*", "--runs", str(workspace.root.path)], input=answer, standalone_mode=False
    )
    assert "cancel these 3 runs?" in result.output
    assert f"{WIDE}  cnn-wide  created" in result.output
    assert live(workspace) == left
