"""Submitting again: with the same idempotency key, or by mistake a moment later."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.workspaces import submit

from slurmtrain.errors import PathError, RequestRefused, SubmitFailed, UserError
from slurmtrain.model.run.events.command_events import CancelRequested, Unstarted
from slurmtrain.model.run.layout import run_id
from slurmtrain.ops.shared import start as start_module
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submission, submit_spec
from slurmtrain.ops.submit.entrances import RecentRun, find_recent
from slurmtrain.ops.submit.submission import Submission

pytestmark = pytest.mark.usefixtures("slurm")

# Each run requests something else, and so is a job of its own.
SWEEP = ("resources.cpus_per_proc=1,2,3",)
pytestmark = pytest.mark.usefixtures("slurm")


# --- keys ------------------------------------------------------------------------------------------------------------


def submit_with(workspace: Workspace, spec: Path, key: str, *sweep: str, executor: str = "slurm") -> Submission:
    """What another command does: nothing is known from earlier ones."""
    return submit_spec(Workspace(workspace.config), load(spec, (), sweep), executor=executor, key=key)


def runs(workspace: Workspace) -> list[str]:
    return workspace.run_ids()


def test_a_second_submission_with_the_same_key_returns_the_same_runs_in_the_same_order(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    first, *_ = submit_with(workspace, spec, "nightly 7", *SWEEP)
    again, notes, _ = submit_with(workspace, spec, "nightly 7", *SWEEP)
    assert again == first == runs(workspace)
    assert f"the idempotency key was already used, for {', '.join(first)}" in notes
    assert len(slurm.calls("sbatch")) == 3


def sweeps(workspace: Workspace) -> set[str | None]:
    return {listed.sweep for listed in observe(workspace, ask_slurm=False).runs.values()}


def test_the_runs_of_a_sweep_share_an_id_that_is_kept_with_the_key(workspace: Workspace, spec: Path) -> None:
    first = submit_with(workspace, spec, "k", *SWEEP)
    assert sweeps(workspace) == {first.sweep} != {None}
    assert first.sweep not in first.run_ids
    [record] = (workspace.root.path / "keys").glob("*.json")
    record.write_text(record.read_text().replace('"complete": true', '"complete": false'))
    shutil.rmtree(workspace.root.run(first.run_ids[1]).path)
    assert submit_with(workspace, spec, "k", *SWEEP).sweep == first.sweep
    assert sweeps(workspace) == {first.sweep}


@pytest.mark.parametrize("change", ["another spec", "more runs", "another executor"])
def test_a_key_with_something_else_is_refused(workspace: Workspace, spec: Path, change: str) -> None:
    [run_id], *_ = submit_with(workspace, spec, "k")
    if change == "another spec":
        spec.write_text(spec.read_text().replace("a: 1", "a: 2"))
    sweep = ("params.a=1,2",) if change == "more runs" else ()
    executor = "local" if change == "another executor" else "slurm"
    with pytest.raises(
        UserError, match=rf"'k' was used to submit something else \(run {run_id}\); nothing was created"
    ):
        submit_with(workspace, spec, "k", *sweep, executor=executor)
    assert runs(workspace) == [run_id]


@pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 256, "\udcff"])
def test_a_key_that_cannot_be_one_is_refused(workspace: Workspace, spec: Path, key: str) -> None:
    with pytest.raises(UserError, match="a key has 1 to 255 printable characters"):
        submit_with(workspace, spec, key)
    assert runs(workspace) == []


def test_a_retry_of_a_sweep_that_failed_in_the_middle_submits_only_the_rest(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: Any, **more: Any) -> Any:
        if len(slurm.calls("sbatch")) == 2:
            raise RequestRefused("too big")
        return start_module.start(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(submission, "start", start)
        with pytest.raises(SubmitFailed) as raised:
            submit_with(workspace, spec, "k", *SWEEP)
    created = list(raised.value.run_ids)
    assert created == runs(workspace)
    retried, *_ = submit_with(workspace, spec, "k", *SWEEP)
    assert retried == runs(workspace)
    assert retried[:2] == created
    values = [
        json.loads(workspace.root.run(run).plan.read_text())["spec"]["resources"]["cpus_per_proc"] for run in retried
    ]
    assert values == [1, 2, 3]
    assert len(slurm.calls("sbatch")) == 3


def test_a_retry_that_fails_again_names_the_earlier_runs_too(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    submitted, *_ = submit_with(workspace, spec, "k", "params.a=1,2")
    # As if the second run had never been created.
    [record] = (workspace.root.path / "keys").glob("*.json")
    record.write_text(record.read_text().replace('"complete": true', '"complete": false'))
    shutil.rmtree(workspace.root.run(submitted[1]).path)
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(SubmitFailed, match=f"submitted: {submitted[0]}; not created: 1 run") as raised:
        submit_with(workspace, spec, "k", "params.a=1,2")
    assert raised.value.run_ids == (submitted[0],)


def test_a_key_whose_submission_left_nothing_can_be_used_for_something_else(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(RequestRefused):
        submit_with(workspace, spec, "k")
    slurm.replies("sbatch", "Submitted batch job 8\n")
    assert submit_with(workspace, spec, "k", *SWEEP).run_ids == runs(workspace)


def test_a_run_that_was_deleted_is_not_submitted_again_but_with_another_key(workspace: Workspace, spec: Path) -> None:
    [run_id], _, sweep = submit_with(workspace, spec, "k")
    assert (sweep, sweeps(workspace)) == (None, {None})
    shutil.rmtree(workspace.root.run(run_id).path)
    with pytest.raises(UserError, match=f"belongs to run {run_id}, whose directory was deleted; choose another key"):
        submit_with(workspace, spec, "k")
    assert runs(workspace) == []
    assert submit_with(workspace, spec, "another").run_ids == runs(workspace)
    for record in (workspace.root.path / "keys").glob("*.json"):
        record.write_text('{"key": "k"}')
    with pytest.raises(PathError, match=r"\.json is not a valid record of an idempotency key"):
        submit_with(workspace, spec, "k")


def test_the_runs_of_a_key_are_returned_while_slurm_is_down(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    submitted, *_ = submit_with(workspace, spec, "k")
    for command in ("squeue", "sacct", "scontrol", "sbatch"):
        slurm.fails(command, f"{command}: error: Unable to contact slurm controller")
    again, notes, _ = submit_with(workspace, spec, "k")
    assert again == submitted
    assert any("Unable to contact slurm controller" in note for note in notes)


def test_commands_with_the_same_key_at_the_same_time_submit_one_run(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    slurm.replies("sbatch", "Submitted batch job 8\n", until=release)
    arguments = ["submit", str(spec), "--executor", "slurm", "--idempotency-key", "k", "--json"]
    environ = {**os.environ, "SLURMTRAIN_RUNS": str(workspace.root.path)}
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "slurmtrain", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    slurm.replies("squeue", squeue_line("8"))
    release.touch()
    printed = [json.loads(command.communicate(timeout=120)[0]) for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0]
    assert [[run["id"] for run in answer["runs"]] for answer in printed] == [runs(workspace)] * 3
    assert len(slurm.calls("sbatch")) == 1


# --- by mistake ------------------------------------------------------------------------------------------------------


def found_for(workspace: Workspace, spec: Path, *overrides: str) -> RecentRun | None:
    return find_recent(Workspace(workspace.config), load(spec, overrides, ()))


def test_a_run_of_the_same_plan_is_found_and_one_of_another_is_not(workspace: Workspace, spec: Path) -> None:
    assert found_for(workspace, spec) is None
    run_ids, *_ = submit(workspace, spec, sweep=["params.a=1,2"], executor="slurm")
    recent = found_for(workspace, spec, "params.a=2")
    assert (recent.id, recent.seconds < 60) == (run_ids[1], True)
    assert found_for(workspace, spec, "params.a=3") is None
    # One that has ended is not meant, nor is one of more than a minute ago.
    with workspace.journal(workspace.root.run(run_ids[1]), "cancel") as journal:
        journal.write(CancelRequested())
        journal.write(Unstarted(submission=1, reason="cancelled before"))
    assert found_for(workspace, spec, "params.a=2") is None
    earlier = run_id(time.time_ns() // 1_000_000 - 61_000, 0)
    workspace.root.run(run_ids[0]).path.rename(workspace.root.run(earlier).path)
    assert found_for(workspace, spec, "params.a=1") is None
