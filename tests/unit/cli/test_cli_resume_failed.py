"""``resume --failed``: which runs it would start, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.start_commands import resume_command
from slurmtrain.errors import NoCheckpoint
from slurmtrain.ops.resume import Resumed, is_without_checkpoint
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe_run
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


def test_the_name_or_id_of_a_sweep_resumes_what_failed_or_was_cancelled(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[tuple[object, object]] = []

    def note(_workspace: Workspace, run_ids: object, overrides: object) -> Resumed:
        resumed.append((run_ids, overrides))
        return Resumed([FAILED, CANCELLED], [])

    monkeypatch.setattr("slurmtrain.ops.resume.resume_failed", note)
    for word in ("cnn", SWEEP):
        result = call(workspace, word, "resources.mem=1GB")
        assert f"{word}: 4 runs; all that failed, were lost or were cancelled start again" in result.stderr
        assert result.stdout.split() == [FAILED, CANCELLED]
    assert resumed == [([FAILED, CANCELLED], ("resources.mem=1GB",))] * 2
    refused = call(workspace, "cnn", "--step", "5")
    assert (refused.exit_code, "for one of them" in refused.output) == (2, True)


def test_a_run_that_never_saved_begins_again_by_either_command_and_one_with_damage_is_refused_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for run_id, state in ((FAILED, "crash"), (CANCELLED, "cancelled"), (COMPLETED, "completed")):
        sim = SimulatedRun(workspace.root.run(run_id), spec={"name": run_id}, executor="local").created()
        sim.submitted().started().ended(state)
    plan = current_plan(workspace.root.run(FAILED), observe_run(workspace, FAILED, ask_slurm=False))
    for run_id in (FAILED, CANCELLED):
        run = observe_run(workspace, run_id, ask_slurm=False)
        assert is_without_checkpoint(workspace.root.run(run_id), run, plan)
    completed = observe_run(workspace, COMPLETED, ask_slurm=False)
    with pytest.raises(NoCheckpoint, match="has no checkpoint to continue from; 'slurmtrain resume --from-start"):
        is_without_checkpoint(workspace.root.run(COMPLETED), completed, plan)
    (workspace.root.run(FAILED).checkpoints / "damaged-step-10").mkdir(parents=True)
    monkeypatch.setattr("slurmtrain.ops.resume.start", lambda *_, **__: [])
    monkeypatch.setattr("slurmtrain.ops.resume.check_executor", lambda *_: None)
    for arguments in ((FAILED,), ("--failed", FAILED)):
        assert "has no checkpoint to continue from, 1 damaged" in str(call(workspace, *arguments).exception)
    for arguments in ((CANCELLED,), ("--failed", CANCELLED, "--cancelled")):
        assert "begin" in (result := call(workspace, *arguments)).stderr, result.exception
