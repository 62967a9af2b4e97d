"""The same plan, submitted a moment ago: noticed as long as its run has not ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmtrain.model.run.events.command import CancelRequested, Unstarted
from slurmtrain.model.run.ids import created_ms, run_id
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit
from slurmtrain.ops.submit.submitted_before import RecentRun, find_recent

pytestmark = pytest.mark.usefixtures("slurm")


def found_for(workspace: Workspace, spec: Path, *overrides: str) -> RecentRun | None:
    return find_recent(Workspace(workspace.config), load(spec, overrides, ()))


def test_a_run_of_the_same_plan_is_found_and_one_of_another_is_not(workspace: Workspace, spec: Path) -> None:
    assert found_for(workspace, spec) is None
    run_ids, *_ = submit(workspace, spec, sweep=["params.a=1,2"], executor="slurm")
    recent = found_for(workspace, spec, "params.a=2")
    assert (recent.id, recent.seconds < 60) == (run_ids[1], True)
    assert found_for(workspace, spec, "params.a=3") is None


def test_one_that_has_ended_is_not_meant(workspace: Workspace, spec: Path) -> None:
    [submitted], *_ = submit(workspace, spec, executor="slurm")
    with workspace.journal(workspace.root.run(submitted), "cancel") as journal:
        journal.write(CancelRequested())
        journal.write(Unstarted(submission=1, reason="cancelled before"))
    assert found_for(workspace, spec) is None


def test_one_of_more_than_a_minute_ago_is_not_meant(workspace: Workspace, spec: Path) -> None:
    [submitted], *_ = submit(workspace, spec, executor="slurm")
    earlier = run_id(time.time_ns() // 1_000_000 - 61_000, 0)
    workspace.root.run(submitted).path.rename(workspace.root.run(earlier).path)
    assert found_for(workspace, spec) is None


def test_the_time_in_an_id_is_that_of_its_creation() -> None:
    assert created_ms(run_id(1_800_000_000_123, 31)) == 1_800_000_000_123
