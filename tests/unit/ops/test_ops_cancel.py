"""Cancelling while another command has the run's lock: the request is recorded, and that command carries it out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import RUN_ID
from helpers.workspaces import build_run, load_run, submit, sync_again

from slurmtrain.errors import RunBusy, RunCancelled
from slurmtrain.model.run.run import Run
from slurmtrain.ops import cancel as cancelling
from slurmtrain.ops.resume import resume
from slurmtrain.ops.shared import start as starting
from slurmtrain.ops.shared.next_attempts import cancels
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job import lease
from slurmtrain.system.locks import locked

SPEC = """
name: x
params: {lr: 1}
command: python -c pass
tracking: {mlflow: {enabled: false}}
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "_LOCK_S", 0.1)
    # These waits must not begin: nobody ends a job that does not exist.
    monkeypatch.setattr(cancelling, "PATIENCE_S", 3600.0)
    monkeypatch.setattr(cancelling, "_KILL_TIMEOUT_S", 3600.0)


def cancel_in_another_command(workspace: Workspace, run_id: str) -> Run:
    return cancelling.cancel(Workspace(workspace.config), [run_id])[run_id]


def meanwhile(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[Path], Any]) -> None:
    """Have another command act while a run is started: right before this function of ``ops.shared.start``."""
    function = getattr(owner, name)

    def after_the_action(first: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, function)
        # An attempt, or several.
        attempt = first.attempts[0] if hasattr(first, "attempts") else first
        action(attempt.run.path)
        return function(first, *arguments)

    monkeypatch.setattr(owner, name, after_the_action)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    return path


def test_a_cancel_does_not_wait_long_for_a_stopped_command_and_names_it(
    workspace: Workspace, slurm: SlurmCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build_run(workspace).command("submitting", submission=1, executor="slurm", attempt=1)
    with locked(run.directory.lock):
        left = cancel_in_another_command(workspace, RUN_ID)
        assert not left.ended
        # Neither does 'sync', which finishes what a killed 'cancel' has begun.
        assert sync_again(workspace).cancelled == []
    notice = capsys.readouterr().err
    assert f"run {RUN_ID} is being started by another command: its lock is held by " in notice
    assert "call 'slurmtrain sync'" in notice
    assert len(cancels(run.directory)) == 1
    # The other command has died: there is no job.
    sync_again(workspace)
    assert load_run(workspace).state == "cancelled"
    assert slurm.calls("sbatch") == []


def test_a_resume_does_not_wait_for_another_command_and_names_it(workspace: Workspace, slurm: SlurmCommands) -> None:
    run = build_run(workspace).submitted().started().reached(5).crashed()
    with locked(run.directory.lock), pytest.raises(RunBusy, match=rf"its lock is held by .*, process {os.getpid()}, "):
        resume(workspace, RUN_ID)
    assert slurm.calls("sbatch") == []


def test_a_run_that_was_cancelled_before_its_submission_is_not_submitted(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, starting, "_claim", lambda run: cancel_in_another_command(workspace, run.name))
    [run_id], notes, _ = submit(workspace, spec, executor="slurm")
    assert f"run {run_id} was cancelled before this command submitted its job; it has no job" in notes
    assert slurm.calls("sbatch") == []
    sync_again(workspace)
    assert load_run(workspace, run_id).state == "cancelled"
    assert slurm.calls("sbatch") == []


def test_a_job_that_is_submitted_after_the_cancel_is_cancelled_too(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, starting._Group, "submit", lambda run: cancel_in_another_command(workspace, run.name))
    [run_id], notes, _ = submit(workspace, spec, executor="slurm")
    assert f"run {run_id} was cancelled while its job was being submitted; job 8 was too" in notes
    assert [call.args for call in slurm.calls("scancel")] == [["8"]]
    assert lease.ended_as(workspace.root.run(run_id), 1) == "cancelled"
    assert load_run(workspace, run_id).cancelled


def test_only_the_cancelled_run_of_a_sweep_loses_its_job(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, starting, "_claim", lambda run: cancel_in_another_command(workspace, run.name))
    runs, notes, _ = submit(workspace, spec, sweep=["params.lr=1,2,3"], executor="slurm")
    assert len(runs) == 3
    assert len(slurm.calls("sbatch")) == 1
    assert [note for note in notes if f"run {runs[0]} was cancelled before" in note]
    assert slurm.calls("scancel") == []


def test_a_resume_that_was_cancelled_meanwhile_says_so_and_an_earlier_cancel_does_not_matter(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [run_id], *_ = submit(workspace, spec, executor="slurm")
    slurm.replies("sacct", f"8|CANCELLED by 0|0:0|100|200|300|30|n0|x-{run_id}\n")
    assert cancel_in_another_command(workspace, run_id).state == "cancelled"
    slurm.replies("sbatch", "Submitted batch job 9\n")
    meanwhile(monkeypatch, starting._Group, "submit", lambda run: cancel_in_another_command(workspace, run.name))
    with pytest.raises(RunCancelled, match="job 9 was too"):
        resume(workspace, run_id, from_start=True)
    assert [call.args for call in slurm.calls("scancel")][-1] == ["9"]


@pytest.mark.parametrize("trains", [True, False])
def test_a_run_of_another_machine_is_cancelled_unless_it_trains_there(workspace: Workspace, trains: bool) -> None:
    run = build_run(workspace, executor="local", requeue={"max_failures": 3}).created()
    run.submitted(process={"host": "elsewhere", "boot": "b", "pid": 1, "start": 1}).started().reached(3, loss=1.0)
    if trains:
        with pytest.raises(RunBusy, match="is on elsewhere, whose processes cannot be reached from here"):
            cancelling.cancel(workspace, [RUN_ID])
    else:
        run.crashed().ended("crash")
        assert observe_run(workspace, RUN_ID, ask_slurm=False).state == "requeued"
        assert cancelling.cancel(workspace, [RUN_ID])[RUN_ID].state == "cancelled"


def test_a_start_that_submits_no_job_leaves_no_claim_that_would_refuse_the_next(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.replies("sacct", "7|FAILED|1:0|100|200|300|30|n0|x-0123456789\n")
    run = build_run(workspace).submitted().started().reached(5).crashed()
    claimed = run.directory.attempt("7", 0)
    with monkeypatch.context() as full:
        full.setattr(starting, "write_new", fails_with_full_disk)
        assert "no space left" in sync_again(workspace).problems[0]
    assert lease.read_claim(claimed, by="submission") is None
    meanwhile(monkeypatch, starting, "_claim", lambda run: cancel_in_another_command(workspace, run.name))
    assert "it has no job" in sync_again(workspace).problems[0]
    assert lease.read_claim(claimed, by="submission") is None
    assert slurm.calls("sbatch") == []


def fails_with_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
