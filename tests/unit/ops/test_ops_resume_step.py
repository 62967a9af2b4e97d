"""``resume --step``: what the next attempt of a run goes on from."""

from __future__ import annotations

from pathlib import Path

from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import RUN_ID
from helpers.workspaces import build_run

from slurmtrain.ops.resume import resume
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint.checkpoint_files import MANIFEST, Manifest, Staging, newest_published
from slurmtrain.system.files import make_directory, write_json


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
