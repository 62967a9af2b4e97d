"""What a sync tells of the runs that it has looked at."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.fakeslurm import FakeScheduler, job
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.webhooks import Webhook, webhook

from slurmtrain.config import Config
from slurmtrain.model.experiment.receivers import STATES, Receiver
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync

HOUR = 3600.0
NO_RESTART = {"requeue": {"max_failures": 0}}


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as each:
        yield each


@pytest.fixture
def listening(workspace: Workspace, hook: Webhook) -> Workspace:
    """A runs root of which somebody is told everything, since long ago."""
    config: Config = replace(workspace.config, notify={"hook": Receiver(to=hook.url, states=STATES, every=2)})
    scheduler = FakeScheduler()
    again = Workspace(config)
    again.prepare()
    again._scheduler = scheduler
    again.root.notices.mkdir()
    (again.root.notices / "since").touch(0o600)
    os.utime(again.root.notices / "since", (1.0, 1.0))
    return again


def begin(workspace: Workspace, ago_s: float = HOUR) -> SimulatedRun:
    return (
        SimulatedRun(workspace.root.run(RUN_ID), now=time.time() - ago_s, spec=NO_RESTART)
        .created()
        .submitted()
        .started()
    )


def test_what_a_job_could_not_tell_is_told_in_the_words_of_why(listening: Workspace, hook: Webhook) -> None:
    sim = begin(listening)
    sim.reached(5).crashed()
    assert sync(listening).problems == []
    assert hook.kinds == ["started", "failed"]
    message = hook.messages[-1]
    assert (message["state"], message["step"], message["attempt"]) == ("failed", 5, 1)
    assert "ValueError" in message["why"]
    sync(listening)
    assert len(hook.requests) == 2


def test_every_second_preemption_is_told(listening: Workspace, hook: Webhook) -> None:
    sim = begin(listening)
    for restart in range(4):
        sim.ended("preempted", 0, restart).started(restart + 1)
    sync(listening)
    assert [(m["kind"], m["number"]) for m in hook.messages] == [("started", 0), ("preempted", 2), ("preempted", 4)]
    assert hook.messages[-1]["title"].endswith("was preempted, for the 4th time")


def test_an_idle_run_is_told_once(listening: Workspace, hook: Webhook) -> None:
    gpus = {"nodes": 1, "gpus_per_node": 2}
    sim = SimulatedRun(listening.root.run(RUN_ID), now=time.time() - 2 * HOUR, spec={"resources": gpus})
    sim.created(resources=gpus).submitted().started()
    listening._scheduler.jobs = [job("RUNNING", "7")]  # type: ignore[attr-defined]
    path = listening.root.run(RUN_ID).attempt("7", 0).system_metrics(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    idle = {f"gpu_{gpu}_utilization_percentage": 0.0 for gpu in range(2)}
    lines = (json.dumps({"t": time.time() - index * 15, "metrics": idle}) for index in range(300, 0, -1))
    path.write_text("".join(f"{line}\n" for line in lines))
    for _ in range(2):
        sync(listening)
    assert hook.kinds == ["started", "idle"]
    assert "idle for 1 h" in hook.messages[-1]["why"]


def test_what_was_before_anybody_was_told_or_is_old_is_told_nobody(listening: Workspace, hook: Webhook) -> None:
    begin(listening).ended("completed", over="completed")
    os.utime(listening.root.notices / "since", (time.time(), time.time()))
    sync(listening)
    os.utime(listening.root.notices / "since", (1.0, 1.0))
    sync(listening)
    assert hook.kinds == ["started", "completed"]


def test_a_deleted_run_is_told_to_nobody_again(listening: Workspace, hook: Webhook) -> None:
    sim = begin(listening).ended("completed", over="completed")
    sync(listening)
    assert len(hook.requests) == 2
    sim.command("delete", bytes=1)
    shutil.rmtree(listening.root.run(RUN_ID).notices)
    sync(listening)
    assert len(hook.requests) == 2


def test_what_is_older_than_a_day_is_told_nobody(listening: Workspace, hook: Webhook) -> None:
    begin(listening, 30 * HOUR).ended("completed", over="completed")
    sync(listening)
    assert hook.requests == []


def test_a_directory_that_cannot_be_written_is_a_problem_and_no_error(listening: Workspace, hook: Webhook) -> None:
    begin(listening).ended("completed", over="completed")
    (listening.root.notices / "since").unlink()
    listening.root.notices.rmdir()
    listening.root.notices.write_text("")
    [problem] = sync(listening).problems
    assert problem.startswith("notifications failed: ")
    assert hook.requests == []
