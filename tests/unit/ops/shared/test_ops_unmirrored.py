"""Which runs are said not to be in MLflow yet."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.workspaces import build_run

from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.trackers import describe_next, describe_refused, describe_unmirrored
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import queries
from slurmtrain.registry.cells import Sent
from slurmtrain.system.files import make_directory


def trained(workspace: Workspace, *, tracked: bool = True) -> SimulatedRun:
    """A run that has logged a metric."""
    run = build_run(workspace, executor="local", tracking={"mlflow": {"enabled": tracked}})
    assert run._plan is not None
    return run.created(**run_settings(run._plan)).submitted().started().reached(3, loss=0.5)


def note(workspace: Workspace) -> str:
    runs = observe(workspace, ask_slurm=False).runs.values()
    return "\n".join(describe_unmirrored(workspace, [run_json(workspace, listed) for listed in runs]))


def mirrored(workspace: Workspace) -> Any:
    return run_json(workspace, observe(workspace, ask_slurm=False).runs[RUN_ID])["mirrored"]


def pretend_to_mirror(workspace: Workspace) -> None:
    """Record, long ago, that everything was sent."""
    listed = observe(workspace, ask_slurm=False).runs[RUN_ID]
    offsets = workspace.store.ask(lambda db: queries.offsets(db, [RUN_ID]))[RUN_ID]
    sent = Sent("mlflow", "sqlite:///x", offsets=offsets, revision=listed.revision)
    workspace.store.write(lambda transaction: transaction.set_sent(RUN_ID, sent))


def test_metrics_that_were_not_sent_are_pointed_out_until_they_are(workspace: Workspace) -> None:
    run = trained(workspace)
    assert note(workspace).startswith(f"metrics of run {RUN_ID} have not been sent yet: 'slurmtrain sync' ")
    assert mirrored(workspace) is False
    pretend_to_mirror(workspace)
    assert (note(workspace), mirrored(workspace)) == ("", True)
    run.reached(4, loss=0.4)
    assert note(workspace).startswith(f"metrics of run {RUN_ID} have not been sent to MLflow yet: ")
    assert mirrored(workspace) is False


def test_news_without_metrics_are_no_reason_to_send_anything(workspace: Workspace) -> None:
    run = trained(workspace)
    pretend_to_mirror(workspace)
    run.command("note", text="good")
    assert (note(workspace), mirrored(workspace)) == ("", False)


def test_a_tracker_that_takes_nothing_is_named_with_what_it_lacks_since_when_and_why(workspace: Workspace) -> None:
    run = trained(workspace)
    pretend_to_mirror(workspace)
    run.reached(5, loss=0.4)
    workspace.root.tracking_lock.touch()
    csv = Sent("csv", "file:///y", step=2, problem="the disk is full", since=0.0, refused=["a b"])
    workspace.store.write(lambda transaction: transaction.set_sent(RUN_ID, csv))
    reason = "since 1970-01-01T00:00:00.000Z: the disk is full"
    assert note(workspace) == f"CSV lacks 3 steps of run {RUN_ID} {reason}"
    facts = run_json(workspace, observe(workspace, ask_slurm=False).runs[RUN_ID])
    assert describe_refused(facts) == ["CSV does not take 'a b'"]
    assert [(each["tracker"], each["behind"], each["complete"]) for each in facts["trackers"]] == [
        ("csv", 3, False), ("mlflow", 5, False),
    ]  # fmt: skip


def test_a_run_that_is_not_tracked_or_has_no_job_is_not_missed(workspace: Workspace) -> None:
    run = trained(workspace, tracked=False)
    assert (note(workspace), mirrored(workspace)) == ("", None)
    assert describe_next(workspace, [run._plan]) == ""


def test_a_run_that_sends_its_metrics_itself_is_not_missed_until_it_stops_that(workspace: Workspace) -> None:
    run = trained(workspace)
    plan = make_test_plan(tracking={"mlflow": {"uri": "https://mlflow.example"}})
    assert describe_next(workspace, [plan]) == ""
    assert describe_next(workspace, [plan, run._plan]) != ""
    live = workspace.root.run(RUN_ID).live_metrics
    live.touch()
    assert note(workspace) == ""
    os.utime(live, (0, 0))
    assert note(workspace) != ""


def test_a_run_of_an_earlier_version_is_not_missed_since_it_may_not_be_tracked(workspace: Workspace) -> None:
    build_run(workspace, executor="local").submitted().started().reached(3, loss=0.5)
    assert (note(workspace), mirrored(workspace)) == ("", None)


@pytest.mark.parametrize(("ago_s", "is_silent"), [(10, True), (3600, False)])
def test_nothing_is_said_while_another_command_keeps_on_sending(
    workspace: Workspace, ago_s: float, is_silent: bool
) -> None:
    run = trained(workspace)
    make_directory(workspace.root.path)
    workspace.root.tracking_lock.touch()
    sent_at = time.time() - ago_s
    os.utime(workspace.root.tracking_lock, (sent_at, sent_at))
    assert (note(workspace) == "", describe_next(workspace, [run._plan]) == "") == (is_silent, is_silent)
