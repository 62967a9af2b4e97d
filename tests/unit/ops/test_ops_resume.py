"""Resuming the failed runs of a sweep: on Slurm as one job array."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import build_run, submit

from slurmtrain.errors import RequestRefused, RunBusy, SpecError, SubmissionUncertain, SubmitFailed
from slurmtrain.ops import resume as resuming
from slurmtrain.ops.resume import find_failed, resume, resume_failed
from slurmtrain.ops.shared import start
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint.checkpoint_files import MANIFEST, Manifest, Staging, newest_published
from slurmtrain.runtime.environment.node import read_launch
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.locks import locked

SPEC = """
name: swept
command: "true"
params: {a: 0}
slurm: {partition: spot}
tracking: {mlflow: {enabled: false}}
"""
FAILED, LOST, RUNNING, CANCELLED, COMPLETED = range(5)


@pytest.fixture
def swept(workspace: Workspace, slurm: SlurmCommands, tmp_path: Path) -> list[str]:
    """The runs of a sweep, whose elements have ended in all ways; one still runs."""
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    run_ids, _, _ = submit(workspace, path, sweep=["params.a=1,2,3,4,5", "parallel=2"], executor="slurm")
    for index, run_id in enumerate(run_ids):
        element = SimulatedRun(workspace.root.run(run_id), job=f"8_{index}", now=time.time()).started()
        if index in (FAILED, LOST):
            element.crashed()
        elif index == CANCELLED:
            element.cancel().ended("cancelled", over="cancelled")
        elif index == COMPLETED:
            element.ended("completed", over="completed")
    slurm.replies("squeue")
    return run_ids


def launched(workspace: Workspace, run_id: str) -> tuple[str, int] | None:
    """The array, and the element, of the second submission of a run; None if that is a job of its own."""
    launch = read_launch(workspace.root.run(run_id).submission(2))
    return launch.array


def test_failed_runs_are_the_elements_of_a_new_array_with_the_overrides_and_the_limit(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    [sweep] = {row.sweep for row in observe(workspace, ask_slurm=False).runs.index.values()}
    assert sweep is not None
    failed = find_failed(workspace, [sweep])
    assert failed == swept[: LOST + 1]
    more = find_failed(workspace, [sweep], cancelled=True)
    assert more == [*failed, swept[CANCELLED]]
    slurm.replies("sbatch", "Submitted batch job 9\n")
    resumed = resume_failed(workspace, more, ["resources.mem=4GB"])
    assert resumed.run_ids == more
    assert [note for note in resumed.notes if note.startswith("3 without a checkpoint start from the beginning")]
    assert len(slurm.calls("sbatch")) == 2
    elements = [launched(workspace, run_id) for run_id in more]
    assert [element and element[1] for element in elements] == [0, 1, 2]
    [array] = {element[0] for element in elements if element}
    [script] = workspace.root.array(array).submitit.glob("9_*.sh")
    assert "--array=0-2%2" in script.read_text()
    assert "#SBATCH --mem=4" in script.read_text()
    for run_id in more:
        directory = workspace.root.run(run_id)
        assert lease.granted_to(directory) == 2
        run = workspace.store.load(run_id)
        observe(workspace, [run_id], ask_slurm=False)
        run = workspace.store.load(run_id)
        assert [attempt.job_id for attempt in run.attempts][1:] == [f"9_{more.index(run_id)}"]
        assert list(run.attempts[-1].overrides) == ["resources.mem=4GB"]


def test_nothing_is_started_if_an_override_is_wrong_or_none_has_failed(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    with pytest.raises(SpecError):
        resume_failed(workspace, find_failed(workspace, swept), ["resources.memory=4GB"])
    with pytest.raises(RunBusy, match=r"none of the runs of .* has failed: 1 running, 1 completed"):
        find_failed(workspace, [swept[RUNNING], swept[COMPLETED]])
    assert len(slurm.calls("sbatch")) == 1


def test_a_run_that_another_command_is_at_work_on_is_left_to_it(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    slurm.replies("sbatch", "Submitted batch job 9\n")
    with locked(workspace.root.run(swept[FAILED]).lock):
        resumed = resume_failed(workspace, swept[: LOST + 1])
    assert resumed.run_ids == [swept[LOST]]
    assert [note for note in resumed.notes if swept[FAILED] in note]
    assert launched(workspace, swept[LOST]) is None


def test_a_run_whose_last_job_is_about_to_end_waits_for_it_in_a_job_of_its_own(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    slurm.replies("squeue", squeue_line("8_0", "None").replace("PENDING", "COMPLETING"))
    slurm.replies("sbatch", "Submitted batch job 9\n")
    resume_failed(workspace, swept[: LOST + 1])
    assert launched(workspace, swept[FAILED]) is None
    [script] = workspace.root.run(swept[FAILED]).submission(2).submitit.glob("9_*.sh")
    # Its name is not that of the array, which Slurm compares for a singleton.
    assert "#SBATCH --dependency=afterany:8_0,singleton\n" in script.read_text()


def test_a_killed_command_leaves_runs_to_be_adopted_or_resumed_again(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is not dead, so that its claims are void only with time.
    monkeypatch.setattr(start, "_CLAIM_S", 0.0)
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmissionUncertain):
        resume_failed(workspace, swept[: LOST + 1])
    # Slurm never had the array: the runs have failed as before, and can be resumed.
    again = Workspace(workspace.config)
    assert find_failed(again, swept) == swept[: LOST + 1]
    # It has it, although the command does not know: both are adopted.
    with pytest.raises(SubmissionUncertain):
        resume_failed(again, swept[: LOST + 1])
    launch = read_launch(workspace.root.run(swept[LOST]).submission(3))
    slurm.replies("squeue", "".join(squeue_line(f"9_{i}", run_id=launch.array[0]) for i in range(2)))
    later = Workspace(workspace.config)
    observe(later)
    adopted = [later.store.load(run_id) for run_id in swept[: LOST + 1]]
    assert [run.newest.job_id for run in adopted if run and run.newest] == ["9_0", "9_1"]


def test_a_refused_array_leaves_runs_that_can_be_resumed_at_once(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(RequestRefused):
        resume_failed(workspace, swept[: LOST + 1])
    slurm.replies("sbatch", "Submitted batch job 9\n")
    assert resume_failed(workspace, find_failed(workspace, swept)).run_ids == swept[: LOST + 1]


def test_a_run_that_cannot_be_resumed_is_named_and_the_others_go_on(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.replies("sbatch", "Submitted batch job 9\n")
    workspace.root.run(swept[FAILED]).plan.unlink()
    workspace.root.run(swept[FAILED]).submission(1).plan.unlink()
    monkeypatch.setattr(resuming, "alive", lambda run: run.id == swept[LOST])
    monkeypatch.setattr(resuming, "_EXIT_S", 0.0)
    resumed = resume_failed(workspace, [swept[FAILED], swept[LOST], swept[CANCELLED]])
    assert resumed.run_ids == [swept[CANCELLED]]
    without_plan, straggles = resumed.problems
    assert f"run {swept[FAILED]} cannot be started again: " in without_plan
    assert "has no plan" in without_plan
    assert f"processes of the last attempt of run {swept[LOST]} still run" in straggles
    with pytest.raises(SubmitFailed, match="has no plan") as failure:
        resume_failed(workspace, [swept[FAILED]])
    assert failure.value.exit_code == 1


def test_a_run_that_the_cluster_could_never_run_keeps_no_other_from_being_resumed(
    workspace: Workspace, slurm: SlurmCommands, swept: list[str]
) -> None:
    slurm.replies("sbatch", "Submitted batch job 9\n")
    plan = workspace.root.run(swept[FAILED]).submission(1).plan
    plan.write_text(plan.read_text().replace('"nodes": 1', '"nodes": 99'))
    resumed = resume_failed(Workspace(workspace.config), swept[: LOST + 1])
    assert resumed.run_ids == [swept[LOST]]
    [problem] = resumed.problems
    assert swept[FAILED] in problem


def manifest_of(step: int) -> Manifest:
    """That of a checkpoint without files."""
    return Manifest(step=step, world_size=1, saved_at=1.0, seconds=1.0, stall_s=0.0, plan_hash="h", attempt="7.0",
                    why="steps", files={})  # fmt: skip


def stage(checkpoints: Path, step: int) -> Staging:
    staging = Staging(checkpoints, "7.0", step)
    make_directory(staging.path, private=True)
    return staging


def test_a_checkpoint_whose_publisher_was_killed_before_the_rename_is_a_later_one(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    slurm.replies("sacct", "7|FAILED|1:0|100|200|300|30|n0|x-0123456789\n")
    run = build_run(workspace).submitted().started().saved(5).reached(40).crashed()
    checkpoints = run.directory.checkpoints
    stage(checkpoints, 5).publish(manifest_of(5))
    write_json(stage(checkpoints, 40).path / MANIFEST, manifest_of(40).to_json())
    resume(workspace, RUN_ID, step=5)
    assert newest_published(checkpoints) == checkpoints / "step-5"
    assert [path.name for path in run.directory.path.glob("checkpoints.before-attempt-*/*")] == ["step-40"]
    assert len(slurm.calls("sbatch")) == 1
