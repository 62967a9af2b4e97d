"""Idle runs are noticed, said, and ended if their specs ask for it."""

from __future__ import annotations

import json
import time

import pytest
from helpers.fakeslurm import FakeScheduler, job
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.ops import cancel as cancelling
from slurmtrain.ops.resume import find_failed
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.ops.why import explain

MINUTE = 60.0


@pytest.fixture
def slurm(workspace: Workspace) -> FakeScheduler:
    scheduler = FakeScheduler()
    scheduler.jobs = [job("RUNNING", "7")]
    workspace._scheduler = scheduler
    return scheduler


def start(workspace: Workspace, idle_min: float, **spec: object) -> SimulatedRun:
    """A run on two nodes whose GPUs were busy until so many minutes ago, and nothing since."""
    gpus = {"nodes": 2, "gpus_per_node": 2}
    sim = SimulatedRun(workspace.root.run(RUN_ID), now=time.time() - 7200, spec={"resources": gpus, **spec})
    sim.created(resources=gpus).submitted().started(nodes=2)
    sim.reached(5, at=time.time() - 5400)
    for number in range(2):
        note(workspace, number, idle_min)
    return sim


def note(workspace: Workspace, node: int, idle_min: float, used: float = 0.0) -> None:
    path, now = workspace.root.run(RUN_ID).attempt("7", 0).system_metrics(node), time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(400, 0, -1):
        use = 95.0 if index * 15 > idle_min * MINUTE else used
        figures = {f"gpu_{gpu}_utilization_percentage": use for gpu in range(2)}
        lines.append(json.dumps({"t": now - index * 15 + 15, "metrics": figures}) + "\n")
    path.write_text("".join(lines))


def record(workspace: Workspace) -> RunRecord:
    return RunRecord(workspace, observe(workspace).runs[RUN_ID])


def synced_again(workspace: Workspace) -> Synced:
    return sync(workspace, track=False)


def test_a_run_whose_gpus_have_done_nothing_for_long_says_so(workspace: Workspace, slurm: FakeScheduler) -> None:
    start(workspace, 30)
    run = record(workspace)
    assert run["idle"] is not None
    since = run["idle"]["since"]
    assert run["idle"] == {"since": since, "gpus": 4, "nodes": 2}
    assert abs(time.time() - 30 * MINUTE - (run.idleness.since if run.idleness else 0)) < 20
    assert run["reason"] == f"its 4 GPUs have been idle since {since}"
    answer = explain(workspace, observe(workspace).runs, RUN_ID)
    assert answer.headline.startswith(f"its 4 GPUs have been idle since {since}; ")
    assert "idle_after: 30m" in str(answer)
    assert "GPUs are idle" not in str(answer)
    # One node that works is enough, and so is a short pause; a suspended job does not run.
    note(workspace, 1, 30, used=40.0)
    assert record(workspace)["idle"] is None
    note(workspace, 1, 5)
    assert (record(workspace)["idle"], record(workspace)["reason"]) == (None, "")
    note(workspace, 1, 30)
    slurm.jobs = [job("SUSPENDED", "7")]
    assert record(workspace)["idle"] is None
    # Nothing ends it: its spec does not ask for that.
    slurm.jobs = [job("RUNNING", "7")]
    assert (synced_again(workspace).ended, record(workspace)["state"]) == ([], "running")


def test_sync_ends_an_idle_run_whose_spec_asks_for_it_and_nothing_starts_it_again(
    workspace: Workspace, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "PATIENCE_S", 0.0)
    monkeypatch.setattr(cancelling, "_KILL_TIMEOUT_S", 0.0)
    sim = start(workspace, 20, idle_after="30m")
    assert synced_again(workspace).ended == []
    for number in range(2):
        note(workspace, number, 31)
    synced = synced_again(workspace)
    assert synced.ended == [RUN_ID]
    why = "its 4 GPUs were idle for 3"
    assert [each for each in synced.notes if each.startswith(f"run {RUN_ID} was ended: {why}")]
    assert ("scancel", ["7"], False) in slurm.questions
    assert synced_again(workspace).ended == []
    sim.ended("cancelled", node=0).ended("cancelled", node=1)
    slurm.jobs, slurm.starts = [], {"7": [job("CANCELLED", "7", ends_at=time.time())]}
    synced = synced_again(workspace)
    run = record(workspace)
    assert (run["state"], synced.started, run["idle"]) == ("cancelled", [], None)
    assert run["reason"].startswith(why)
    assert run["reason"].endswith("(idle_after: 30 min)")
    # Not a person's doing and not a search's: 'resume --failed --cancelled' may take it.
    assert find_failed(workspace, [RUN_ID], cancelled=True) == [RUN_ID]
    assert explain(workspace, observe(workspace).runs, RUN_ID).headline.startswith(f"it was cancelled: {why}")
