"""Waiting for runs that cannot be read."""

from __future__ import annotations

import os
import threading

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.ops import wait as wait_module
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.wait import wait

OTHER_ID = "0123456788"


def test_a_run_that_stays_unreadable_is_no_longer_waited_for_after_a_while(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_module, "PATIENCE_S", 0.3)
    SimulatedRun(workspace.root.run(OTHER_ID), executor="local").submitted().started().ended("completed")
    run = workspace.root.run(RUN_ID)
    SimulatedRun(run, executor="local").submitted().started()
    os.mkfifo(run.journals / "x.jsonl")
    completed, synced = wait(workspace, [OTHER_ID, RUN_ID], lambda _: None)
    assert not completed
    assert [listed.state for listed in synced.observed.runs.fetch([OTHER_ID, RUN_ID]).values()] == [
        "completed",
        "unreadable",
    ]


def test_a_run_that_cannot_be_read_for_a_moment_is_waited_for(workspace: Workspace) -> None:
    run = workspace.root.run(RUN_ID)
    SimulatedRun(run, executor="local").submitted().started().ended("completed")
    os.mkfifo(run.journals / "x.jsonl")
    states: list[str] = []
    shown_once = threading.Event()

    def show(runs: object) -> None:
        states.extend(listed.state for listed in runs.values())  # type: ignore[attr-defined]
        if not shown_once.is_set():
            shown_once.set()
            (run.journals / "x.jsonl").unlink()

    completed, _ = wait(workspace, [RUN_ID], show)
    assert (completed, states) == (True, ["unreadable", "completed"])
