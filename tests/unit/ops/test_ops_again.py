"""Runs that were interrupted, and that no agent can start again: commands do it once, when it is time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.simulated_run import CRASHED, RUN_ID, SimulatedRun
from helpers.workspaces import build_run, load_run, sync_again

from slurmtrain import local
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops import sync as syncing
from slurmtrain.ops.logs import Choice, read_logs
from slurmtrain.ops.shared import start as starting
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced
from slurmtrain.runtime.job import lease
from slurmtrain.system.process import this_process

OVER = "7|FAILED|1:0|100|200|300|30|n0|x-0123456789\n"


@pytest.fixture(autouse=True)
def over(slurm: SlurmCommands) -> None:
    """Its last job has failed."""
    slurm.replies("sacct", OVER)


def crashed(workspace: Workspace, **spec: Any) -> SimulatedRun:
    """A run whose only attempt has trained for five steps and crashed."""
    return build_run(workspace, **spec).submitted().started().reached(5).crashed()


# --- a new submission -----------------------------------------------------------------------------------------------


def test_a_run_that_crashed_is_submitted_again_once_and_waits_for_its_last_job(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = crashed(workspace)
    assert sync_again(workspace).started == [RUN_ID]
    slurm.replies("squeue", squeue_line("8"))
    assert sync_again(workspace).started == []
    assert len(slurm.calls("sbatch")) == 1
    script = (run.directory.submission(2).submitit / "8_submission.sh").read_text()
    assert "#SBATCH --dependency=singleton\n" in script
    assert "--exclude" not in script
    run_now = load_run(workspace)
    assert (run_now.state, [(a.job_id, a.asked_by) for a in run_now.attempts]) == (
        "pending",
        [("7", "submit"), ("8", "sync")],
    )
    assert lease.granted_to(run.directory) == 2


def test_a_run_whose_job_slurm_has_not_called_over_is_left_to_slurm(workspace: Workspace, slurm: SlurmCommands) -> None:
    crashed(workspace)
    slurm.replies("squeue", squeue_line("7", "BeginTime", restart=1))
    assert sync_again(workspace).started == []
    assert load_run(workspace).state == "requeued"
    slurm.fails("squeue", "squeue: error: down")
    slurm.fails("sacct", "sacct: error: down")
    assert sync_again(workspace).started == []
    assert slurm.calls("sbatch") == []


def test_a_run_waits_as_long_as_its_policy_says_and_is_then_submitted_once(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(syncing.time, "time", lambda: now + 29)
    build_run(workspace).submitted().started().reached(5).crashed(at=now)
    assert sync_again(workspace).started == []
    assert load_run(workspace).state == "requeued"
    monkeypatch.setattr(syncing.time, "time", lambda: now + 31)
    assert sync_again(workspace).started == [RUN_ID]
    slurm.replies("squeue", squeue_line("8"))
    assert sync_again(workspace).started == []
    assert len(slurm.calls("sbatch")) == 1


def test_a_run_that_failed_too_often_is_not_submitted_again_and_says_so(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = crashed(workspace, requeue={"max_failures": 1})
    run.job = "8"
    run.submitted(2, by="sync").started(submission=2).reached(5).crashed(error="KeyError")
    slurm.replies("sacct", OVER.replace("7|", "8|", 1))
    assert sync_again(workspace).started == []
    run_now = load_run(workspace)
    assert (run_now.state, run_now.reason) == ("failed", f"{CRASHED}; it failed twice, and requeue.max_failures is 1")
    assert slurm.calls("sbatch") == []


def test_a_run_that_is_not_to_be_started_again_is_not(workspace: Workspace, slurm: SlurmCommands) -> None:
    crashed(workspace, requeue={"enabled": False})
    assert sync_again(workspace).started == []
    assert (load_run(workspace).state, load_run(workspace).reason) == ("failed", f"{CRASHED}; requeue.enabled is false")
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize("executor", ["slurm", "local"])
@pytest.mark.parametrize("at", [160.0, 300.0], ids=["before", "after"])
def test_a_run_that_a_person_cancelled_never_starts_again(
    workspace: Workspace, slurm: SlurmCommands, launched: list[str], at: float, executor: str
) -> None:
    build_run(workspace, executor=executor).submitted().started().reached(5).cancel(at=at).crashed(at=200.0)
    for _ in range(2):
        assert sync_again(workspace).started == []
    assert (load_run(workspace).state, slurm.calls("sbatch"), launched) == ("cancelled", [], [])


def test_a_submission_that_fails_leaves_no_claim_behind(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = crashed(workspace)
    slurm.fails("sbatch", "sbatch: error: Unable to contact slurm controller (connect failure)")
    [problem] = sync_again(workspace).problems
    assert "cannot be started again" in problem
    assert load_run(workspace).state == "requeued"
    assert lease.read_claim(run.directory.attempt("7", 0), by="submission") is None
    slurm.replies("sbatch", "Submitted batch job 8\n")
    assert sync_again(workspace).started == [RUN_ID]


def test_a_start_that_slurm_failed_before_any_agent_began_is_made_up_for(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    """As where srun is refused its step: the job's earlier start was still being ended on a node that is dead."""
    run = build_run(workspace).submitted().started().reached(5)
    run.node("requeue", cause="preempted", why="preempted", exclude=[], delay_s=0.0)
    run.node("end", cause="preempted", reason="preempted", failed_at=150.0, signal="SIGTERM", sure=True, failures=[])
    slurm.replies("sacct", OVER.replace("FAILED|1:0", "REQUEUED|0:0") + OVER.replace("|100|200|300|", "|200|300|300|"))
    assert sync_again(workspace).started == [RUN_ID]
    slurm.replies("squeue", squeue_line("8"))
    assert sync_again(workspace).started == []
    assert len(slurm.calls("sbatch")) == 1
    assert [attempt.key for attempt in load_run(workspace).attempts] == ["7.0", "7.1", "8.0"]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_of_a_command_that_was_killed_is_void(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = crashed(workspace)
    run.directory.submission(2).path.mkdir()
    assert lease.claim_restart(run.directory.attempt("7", 0), "submission", {"submission": 2, "t": 200.0})
    assert sync_again(workspace).started == [RUN_ID]
    assert len(slurm.calls("sbatch")) == 1
    assert lease.granted_to(run.directory) == 3


def test_what_an_agent_claimed_is_for_commands_to_claim_once_its_job_is_over(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = crashed(workspace)
    assert lease.claim_restart(run.directory.attempt("7", 0), "agent")
    assert sync_again(workspace).started == [RUN_ID]
    assert len(slurm.calls("sbatch")) == 1


def test_a_claim_that_a_submission_came_of_refuses_another(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = crashed(workspace)
    # Somebody else has just submitted it, which is not known here yet.
    assert lease.claim_restart(run.directory.attempt("7", 0), "submission", {"submission": 2})
    real = starting._new_submission

    def late(directory: RunDir) -> Any:
        run.command("submitting", at=time.time(), submission=2, attempt=2, executor="slurm", host="other", by="sync")
        return real(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "_new_submission", late)
        [problem] = sync_again(workspace).problems
    assert f"another command is starting run {RUN_ID} right now" in problem
    assert slurm.calls("sbatch") == []


@contextlib.contextmanager
def _everybody_has_it(path: Path, *, wait: bool = True) -> Iterator[int]:
    """A lock of a file system that has none."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield handle
    finally:
        os.close(handle)


def test_two_commands_submit_once_though_locks_do_not_work(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(workspace)
    monkeypatch.setattr("slurmtrain.ops.shared.next_attempts.locked", _everybody_has_it)
    both = threading.Barrier(2)
    claim = starting._claim

    def together(*arguments: Any) -> None:
        both.wait(60)
        claim(*arguments)

    monkeypatch.setattr(starting, "_claim", together)
    syncs: list[Synced] = []
    commands = [threading.Thread(target=lambda: syncs.append(sync_again(workspace))) for _ in range(2)]
    for command in commands:
        command.start()
    for command in commands:
        command.join(120)
    assert len(slurm.calls("sbatch")) == 1
    assert sorted(len(synced.started) for synced in syncs) == [0, 1]


def test_a_submission_that_another_command_makes_just_now_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    first = starting._new_submission(run)
    other = run.submission(first.number + 1)
    listdir = os.listdir

    def before_the_other(path: Path) -> list[str]:
        entries = listdir(path)
        other.path.mkdir(exist_ok=True)
        return entries

    monkeypatch.setattr(os, "listdir", before_the_other)
    assert starting._new_submission(run).number == other.number + 1


def test_a_claim_that_is_just_being_made_use_of_is_not_void_though_locks_do_not_work(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(workspace)
    monkeypatch.setattr("slurmtrain.ops.shared.next_attempts.locked", _everybody_has_it)
    claim_restart = lease.claim_restart
    others: list[Synced] = []

    def while_another_command_looks(*arguments: Any) -> bool:
        monkeypatch.setattr(lease, "claim_restart", claim_restart)
        claimed = claim_restart(*arguments)
        others.append(sync_again(workspace))
        return claimed

    monkeypatch.setattr(lease, "claim_restart", while_another_command_looks)
    sync_again(workspace)
    assert [other.started for other in others] == [[]]
    assert len(slurm.calls("sbatch")) == 1


# --- a job that Slurm holds -----------------------------------------------------------------------------------------


def held(workspace: Workspace, slurm: SlurmCommands) -> SimulatedRun:
    """Its agent has put the job back once too often for Slurm."""
    run = build_run(workspace).submitted().started().reached(5)
    run.node("requeue", cause="crash", why=CRASHED, exclude=[], delay_s=0.0).crashed()
    slurm.replies("squeue", squeue_line("7", "JobHeldAdmin", restart=5))
    slurm.replies("sacct", OVER.replace("FAILED", "REQUEUED"))
    return run


def test_a_job_that_slurm_holds_for_good_is_ended_and_another_one_submitted(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = held(workspace, slurm)
    assert sync_again(workspace).started == [RUN_ID]
    assert [call.args for call in slurm.calls("scancel")] == [["7"]]
    assert len(slurm.calls("sbatch")) == 1
    assert [attempt.key for attempt in load_run(workspace).attempts] == ["7.0", "8.0"]
    slurm.replies("squeue", squeue_line("8"))
    slurm.replies("sacct", OVER.replace("FAILED", "REQUEUED") + OVER.replace("FAILED", "CANCELLED"))
    assert sync_again(workspace).started == []
    assert load_run(workspace).state == "pending"
    assert (run.directory.claims / "7.0.submission.json").exists()


def test_a_job_that_could_not_be_ended_is_ended_before_another_one_waits_for_it(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    held(workspace, slurm)
    slurm.fails("scancel", "scancel: error: Unable to contact slurm controller")
    [problem] = sync_again(workspace).problems
    assert "cannot be started again" in problem
    assert slurm.calls("sbatch") == []
    slurm.replies("scancel")
    sync_again(workspace)
    assert len(slurm.calls("scancel")) == 2
    assert len(slurm.calls("sbatch")) == 1


def test_a_held_job_that_no_command_would_submit_again_is_not_cancelled(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    """Slurm has put it back by itself, and holds it."""
    build_run(workspace, requeue={"enabled": False}).submitted().started().reached(5)
    slurm.replies("squeue", squeue_line("7", "JobHeldAdmin", restart=5))
    slurm.replies("sacct", OVER.replace("FAILED", "NODE_FAIL"))
    sync_again(workspace)
    assert slurm.calls("scancel") == []
    assert load_run(workspace).state == "requeued"


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "JobHeldUser"])
def test_a_job_that_a_person_holds_is_not_ended(workspace: Workspace, slurm: SlurmCommands, reason: str) -> None:
    """Slurm itself holds none that was started so seldom."""
    held(workspace, slurm)
    slurm.replies("squeue", squeue_line("7", reason, restart=1))
    sync_again(workspace)
    assert slurm.calls("scancel") == slurm.calls("sbatch") == []


# --- on this machine ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were started on this machine, none of which does anything."""
    jobs: list[str] = []

    def launch(_plan: Plan, _submission: Any, job_id: str, _secrets: Any) -> Any:
        jobs.append(job_id)
        return this_process()

    monkeypatch.setattr(local, "launch_here", launch)
    return jobs


def local_run(workspace: Workspace) -> SimulatedRun:
    return build_run(workspace, executor="local", job="local-abc")


def test_a_local_run_that_crashed_is_started_again_once(workspace: Workspace, launched: list[str]) -> None:
    local_run(workspace).submitted().started().reached(5).crashed()
    assert sync_again(workspace).started == [RUN_ID]
    assert sync_again(workspace).started == []
    assert len(launched) == 1
    assert [attempt.job_id for attempt in load_run(workspace).attempts] == ["local-abc", launched[0]]


def test_a_local_run_whose_processes_are_still_there_waits_for_them(workspace: Workspace, launched: list[str]) -> None:
    local_run(workspace).submitted(process=this_process().to_dict()).started().reached(5).crashed()
    assert (sync_again(workspace).started, load_run(workspace).state, launched) == ([], "requeued", [])


def test_a_local_run_whose_processes_were_killed_is_started_again(workspace: Workspace, launched: list[str]) -> None:
    gone = {**this_process().to_dict(), "start": 1, "started": 1, "pid": 2**22 - 1}
    local_run(workspace).submitted(process=gone).started(process=gone).reached(5)
    assert sync_again(workspace).started == [RUN_ID]
    assert (len(launched), load_run(workspace).attempts[0].cause) == (1, "lost")


def test_a_local_run_of_another_machine_says_where_it_would_start_again(
    workspace: Workspace, launched: list[str]
) -> None:
    elsewhere = {**this_process().to_dict(), "host": "elsewhere"}
    local_run(workspace).submitted(process=elsewhere).started(process=elsewhere).reached(5).crashed()
    synced = sync_again(workspace)
    assert (synced.started, synced.problems, launched) == ([], [], [])
    assert synced.notes == [
        f"run {RUN_ID} was interrupted on elsewhere: call 'slurmtrain sync' there to start it again"
    ]


def test_following_logs_say_once_that_a_run_waits_for_a_command(workspace: Workspace, launched: list[str]) -> None:
    run = local_run(workspace).submitted().started().reached(5).crashed()
    logs = run.directory.attempt("local-abc", 0).logs
    logs.mkdir()
    heard: list[str] = []
    lines = read_logs(workspace, RUN_ID, Choice(), follow=True, waits=heard.append)
    for rank in range(3):
        # A file that is not read yet is found at the next look.
        (logs / f"rank-{rank}.log").write_text("here\n")
        assert next(lines).origin == f"rank {rank}"
    assert heard == [f"{CRASHED}; 'slurmtrain sync' or 'watch' starts it again, 30 s after it ended"]
    assert launched == []
