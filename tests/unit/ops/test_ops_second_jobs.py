"""Jobs that wait for more nodes of a run: they end with it, whoever ends it."""

from __future__ import annotations

import time

from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import build_run, sync_again

from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.shared.current_plan import run_settings
from slurmtrain.ops.shared.slurm_jobs import live_jobs
from slurmtrain.ops.shared.workspace import Workspace

RESOURCES = {"nodes": {"min": 1, "max": 2}, "grow": True}


def grows(workspace: Workspace) -> SimulatedRun:
    """A run on one of two nodes."""
    run = build_run(workspace, resources=RESOURCES)
    assert run._plan is not None
    run.created(**run_settings(run._plan))
    return run.submitted().later(time.time() - 200).started()


def queue(*jobs: str) -> str:
    """What squeue prints: the second job 8, and these."""
    return "".join(map(squeue_line, jobs)) + squeue_line("8", run_id=f"{RUN_ID}-more")


def test_a_second_job_stays_while_its_run_trains(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    run.node("nodes_requested", job_id="8", nodes=1)
    slurm.replies("squeue", queue("7").replace("PENDING", "RUNNING", 1))
    synced = sync_again(workspace)
    assert (slurm.calls("scancel"), synced.notes) == ([], [])


def test_sync_cancels_a_second_job_whose_run_waits_again(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    run.ended("preempted", reason="stopped by SIGTERM")
    slurm.replies("scancel")
    slurm.replies("scontrol")
    slurm.replies("squeue", squeue_line("7", restart=1) + queue())
    synced = sync_again(workspace)
    assert [call.args for call in slurm.calls("scancel")] == [["8"]]
    assert synced.notes == [f"run {RUN_ID}: cancelled job 8, which waited for more nodes of it"]


def test_the_end_of_a_run_by_hand_is_that_of_its_second_job(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = grows(workspace)
    slurm.replies("scontrol")
    slurm.replies("scancel")
    slurm.replies("squeue", queue("7"))
    assert sorted(live_jobs(workspace, RUN_ID, None)) == ["7", "8"]
    slurm.replies("squeue", "")
    slurm.replies("sacct", f"7|CANCELLED by 0|0:0|100|200|{int(time.time())}|30|n0|x-{RUN_ID}\n")
    run.later(time.time())
    cancel(workspace, [RUN_ID], force=True)
    assert [call.args for call in slurm.calls("scancel")][-1] == ["--me", f"--name=x-{RUN_ID}-more"]
