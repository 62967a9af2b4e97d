"""Why a run is in its state, from its files and what Slurm says, for each state."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers.fakeslurm import FakeScheduler, job
from helpers.simulated_run import ELSEWHERE, RUN_ID, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.errors import RunNotFound, SlurmDown
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import Explanation, explain
from slurmtrain.slurm import queue_place


def why(workspace: Workspace, number: int | None = None, *, ask: bool = True) -> Explanation:
    return explain(workspace, observe(workspace).runs, RUN_ID, number, ask=ask)


@pytest.fixture
def sim(workspace: Workspace) -> SimulatedRun:
    """A run of Slurm's, just submitted."""
    return SimulatedRun(workspace.root.run(RUN_ID), now=time.time() - 600, spec={"name": "cnn"}).submitted()


@pytest.fixture
def slurm(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    scheduler = FakeScheduler()
    workspace._scheduler = scheduler

    def down(*command: str, **_: Any) -> str:
        raise SlurmDown(f"{command[0]} did not answer within 4 s")

    monkeypatch.setattr(queue_place, "run_command", down)
    return scheduler


def test_a_job_that_waits_has_slurms_reason_though_other_questions_are_not_answered(
    workspace: Workspace, sim: SimulatedRun, slurm: FakeScheduler
) -> None:
    slurm.jobs = [job("PENDING", sim.job, reason="Resources", starts_at=2e9)]
    explanation = why(workspace)
    assert explanation.headline == (
        "it waits: the nodes that it needs are busy (Resources); estimated start 2033-05-18T03:33:20.000Z"
    )
    assert "did not answer within 4 s" in explanation.unanswered
    assert not explanation.alternatives
    facts = json.loads(json.dumps(explanation.to_dict()))
    assert (facts["name"], facts["state"], facts["pending"]["code"]) == ("cnn", "pending", "Resources")
    assert (facts["root"], facts["sooner"], facts["logs"]["read"]) == (None, [], 0)
    assert str(why(workspace, ask=False)) == explanation.headline
    # What show and the live page have asks no more than they did.
    assert why(workspace, ask=False).unanswered == ""


def test_a_slurm_that_is_down_leaves_what_is_known(
    workspace: Workspace, sim: SimulatedRun, slurm: FakeScheduler
) -> None:
    slurm.squeue_problem = slurm.problem = "squeue did not answer within 5 s"
    explanation = why(workspace)
    assert explanation.headline.startswith(f"it waits: its job {sim.job} was submitted ")
    assert explanation.headline.endswith("and Slurm does not answer")
    assert explanation.unanswered == slurm.problem


def test_a_run_that_trains_says_so_with_its_last_save(
    workspace: Workspace, sim: SimulatedRun, slurm: FakeScheduler
) -> None:
    now = time.time()
    sim.started(at=None, nodes=2).rank("session", step=0, world_size=2, device="cpu")
    for step in range(10):
        sim.reached(step + 1, at=now - 20 + step, loss=1.0)
    sim.saved(5, saved_at=now - 15)
    gpus = {"gpu_0_utilization_percentage": 1.0, "cpu_utilization_percentage": 97.0}
    notes = workspace.root.run(RUN_ID).attempt(sim.job, 0).system_metrics(1)
    notes.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text("".join(json.dumps({"t": now - 9 + i, "step": i, "metrics": gpus}) + "\n" for i in range(3)))
    slurm.jobs = [job("RUNNING", sim.job, ends_at=now + 60)]
    explanation = why(workspace)
    assert explanation.headline.startswith(
        "it trains: step 10, 1 steps/s; 1 of 1 GPUs is idle while processors are 97 % busy"
    )
    assert explanation.details[0].startswith("last save: step 5, ")
    assert "raise resources.cpus_per_proc" in explanation.advice[0]
    slurm.jobs = [job("SUSPENDED", sim.job)]
    explanation = why(workspace, ask=False)
    assert explanation.headline.startswith("Slurm has suspended it: its processes are stopped")
    assert f"`scontrol resume {sim.job}`" in explanation.advice[0]
    slurm.jobs = [job("RUNNING", sim.job)]
    sim.node("stopping", cause="preempted", why="SIGTERM came", signal="SIGTERM")
    assert why(workspace).headline == "it is ending, and its ranks save and exit: SIGTERM came"
    sim.cancel()
    assert why(workspace).headline == "it is ending, and its ranks save and exit: it was cancelled"


def test_an_interrupted_run_says_what_starts_it_again_and_a_failed_attempt_can_be_asked_about(
    workspace: Workspace, slurm: FakeScheduler
) -> None:
    sim = SimulatedRun(workspace.root.run(RUN_ID), executor="local", spec={"name": "cnn"}, job="local-1")
    sim.submitted(process=ELSEWHERE).started().reached(3).ended("preempted", reason="asked to stop", requeued=True)
    sim.node("requeue", why="asked to stop", cause="preempted")
    explanation = why(workspace)
    assert explanation.diagnosis.run.state == "requeued"
    assert explanation.headline.startswith("it was interrupted, and waits to go on: asked to stop")
    first = why(workspace, 1)
    assert first.headline == explanation.diagnosis.run.attempts[0].reason
    with pytest.raises(RunNotFound, match="has no attempt 9"):
        why(workspace, 9)
    assert slurm.questions == []


def test_runs_that_have_ended_say_how(workspace: Workspace, sim: SimulatedRun, slurm: FakeScheduler) -> None:
    slurm.starts = {sim.job: [job("CANCELLED by 0", sim.job, ends_at=time.time())]}
    explanation = why(workspace)
    assert explanation.headline.startswith("it was cancelled in Slurm by root, ")
    assert explanation.advice == [f"`slurmtrain resume {RUN_ID} --from-start` starts it again"]
    other = SimulatedRun(workspace.root.run("0123456780"), executor="local", spec={"name": "d"}, job="local-2")
    other.submitted(process=ELSEWHERE).started().reached(3).ended("completed")
    runs = observe(workspace).runs
    assert explain(workspace, runs, "0123456780").headline.startswith("it completed 3 steps in ")
    with pytest.raises(RunNotFound, match="is gone"):
        explain(workspace, runs, "0123456777")


def test_a_run_whose_files_cannot_be_read_says_so(tmp_path: Any) -> None:
    workspace = make_workspace(tmp_path / "runs")
    SimulatedRun(workspace.root.run(RUN_ID), executor="local", spec={"name": "cnn"}).submitted(process=ELSEWHERE)
    observe(workspace)
    journal = workspace.root.run(RUN_ID).path / "journal" / "submit.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/null")
    explanation = why(workspace)
    assert explanation.diagnosis.run.state == "unreadable"
    assert "submit.jsonl" in explanation.headline
