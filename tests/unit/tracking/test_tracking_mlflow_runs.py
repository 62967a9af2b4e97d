"""The MLflow runs of a real store: what they show of runs, apart from metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from helpers.simulated_run import SimulatedRun, make_test_plan

from slurmtrain.config import Config
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import write_json
from slurmtrain.tracking.to_mlflow.mlflow_runs import flatten_sweep

Add = Callable[..., SimulatedRun]
CREATED = {
    "by": "ada@login1",
    "git": {"commit": "abc", "dirty": True, "branch": "wider"},
    "spec_file": "/home/ada/digits.yaml",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store, which the tests of this module share."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def workspace(tmp_path: Path, store: str) -> Workspace:
    """A runs root of its own with that store."""
    runs = tmp_path / "runs"
    return Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=store))


@pytest.fixture
def add(workspace: Workspace, request: pytest.FixtureRequest) -> Add:
    """Adds a run that has been submitted, in an experiment that is named for the test."""

    def add(run_id: str = "0123456789", created: dict[str, Any] | None = None, **spec: Any) -> SimulatedRun:
        spec = {"name": "digits", "tracking": {"mlflow": {"experiment": request.node.name}}, **spec}
        run = SimulatedRun(workspace.root.run(run_id), spec=spec, job=run_id, now=1000.0)
        plan = make_test_plan(**spec)
        write_json(run.directory.plan, plan.to_json())  # type: ignore[union-attr]
        fields = {"name": "digits", "executor": "slurm", **CREATED, **run_settings(plan), **(created or {})}
        return run.write("journal/created.jsonl", "created", **fields).submitted()

    return add


@pytest.fixture
def shown(store: str, request: pytest.FixtureRequest) -> Callable[[], list[Any]]:
    """The MLflow runs of the test's experiment, oldest first."""
    client = mlflow.MlflowClient(store)

    def shown() -> list[Any]:
        experiment = client.get_experiment_by_name(request.node.name)
        return [] if experiment is None else client.search_runs([experiment.experiment_id], order_by=["start_time"])

    return shown


def send(workspace: Workspace) -> MirrorOutcome:
    """Send what is new, as another command would; nothing goes wrong."""
    again = Workspace(workspace.config)
    outcome = mirror_runs(again, (runs := observe(again, ask_slurm=False).runs).fetch(runs.index))
    assert outcome.problems == []
    return outcome


def test_a_run_is_shown_from_when_training_started_with_who_submitted_what(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]]
) -> None:
    sim = add(params={"lr": 0.1}, command="python train.py", created={"varies": {"params.lr": 0.1}})
    send(workspace)
    assert shown() == []  # MLflow never changes the time at which a run started
    sim.later(600).started().reached(1, loss=0.5)
    send(workspace)
    [run] = shown()
    assert (run.info.run_name, run.info.status, run.info.user_id) == ("digits lr=0.1", "RUNNING", "ada")
    assert 1600 <= run.info.start_time / 1000 <= 1610
    assert 600 <= run.data.metrics["system/queue_s"] <= 610
    tags = {name: run.data.tags.get(f"mlflow.source.{name}") for name in ("name", "type", "git.commit", "git.branch")}
    assert tags == {"name": "train.py", "type": "LOCAL", "git.commit": "abc", "git.branch": "wider"}
    sim.stopped().command("note", text="too slow").command("tags", add=["baseline"]).started(restart=1)
    send(workspace)
    [run] = shown()
    assert run.data.tags["slurmtrain.cause"] == "preempted"
    assert (run.data.tags["mlflow.note.content"], run.data.tags["slurmtrain.tags"]) == ("too slow", "baseline")
    sim.reached(2, restart=1).ended("completed", restart=1)
    send(workspace)
    [run] = shown()
    assert (run.info.status, run.info.end_time / 1000) == ("FINISHED", sim.now)
    assert (run.data.tags["slurmtrain.attempt"], run.data.tags["slurmtrain.state"]) == ("2", "completed")


def test_the_runs_of_a_sweep_are_in_the_list_and_the_parent_that_earlier_versions_gave_them_goes(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]], store: str
) -> None:
    client = mlflow.MlflowClient(store)
    for run_id, lr in (("0123456780", 0.1), ("0123456781", 0.2)):
        sim = add(run_id, {"sweep": "sweep00000", "varies": {"params.lr": lr}}, params={"lr": lr})
        sim.started().reached(1, loss=lr)
    send(workspace)
    runs = shown()
    assert {run.info.run_name for run in runs} == {"digits lr=0.1", "digits lr=0.2"}
    assert all("mlflow.parentRunId" not in run.data.tags for run in runs)
    assert {run.data.tags["slurmtrain.sweep"] for run in runs} == {"sweep00000"}
    experiment = runs[0].info.experiment_id
    former = {"slurmtrain.sweep_id": "sweep00000", "slurmtrain.created_at": "9999999999.0"}
    parents = [client.create_run(experiment, tags={**former, **more}) for more in ({}, {"mine": "yes"})]
    for run, parent in zip(runs, parents, strict=True):
        client.set_tag(run.info.run_id, "mlflow.parentRunId", parent.info.run_id)
    flatten_sweep(client, experiment, "another")
    assert len(shown()) == 4
    flatten_sweep(client, experiment, "sweep00000")
    left = shown()
    assert all("mlflow.parentRunId" not in run.data.tags for run in left)
    # Somebody has tagged one of the parents.
    assert {run.info.run_id for run in left} == {*(run.info.run_id for run in runs), parents[1].info.run_id}


def test_a_run_that_was_deleted_before_it_was_sent_is_not_sent_and_one_that_was_sent_gets_its_end(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]]
) -> None:
    sim = add().started().reached(1, loss=0.5)
    send(workspace)
    for other in (sim, add("0123456781").started().reached(1, loss=0.5)):
        other.ended("completed").command("delete", bytes=1, by="ada@login").command("deleted")
    assert send(workspace).mirrored == ["0123456789"]
    assert [run.info.status for run in shown()] == ["FINISHED"]
    assert send(workspace) == MirrorOutcome()


def test_a_run_that_goes_on_with_other_params_is_shown_with_these_and_the_old_values_as_tags(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = add(params={"lr": 0.1, "steps": 4})
    sim.started().reached(1, loss=0.9).reached(2, loss=0.8).saved(2).ended("cancelled")
    send(workspace)
    [before] = shown()
    client = mlflow.MlflowClient(store)
    client.set_tag(before.info.run_id, "reviewed", "yes")
    assert before.data.params == {"lr": "0.1", "steps": "4"}
    sim._plan = make_test_plan(name="digits", params={"lr": 0.5, "steps": 4}, tracking=sim._plan.content["tracking"])  # type: ignore[union-attr]
    sim.job = "later"
    sim.submitted(2, by="resume", **run_settings(sim._plan)).started(submission=2).reached(3, loss=0.7).saved(3)
    sim.ended("completed")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(mlflow.MlflowClient, "delete_run", die)
        send(workspace)
    send(workspace)
    [after] = shown()
    assert after.info.run_id != before.info.run_id
    assert after.data.params == {"lr": "0.5", "steps": "4"}
    assert (after.data.tags["slurmtrain.attempt_1.params.lr"], after.data.tags["reviewed"]) == ("0.1", "yes")
    assert "slurmtrain.attempt_1.params.steps" not in after.data.tags
    assert after.info.start_time == before.info.start_time
    assert [point.step for point in client.get_metric_history(after.info.run_id, "loss")] == [1, 2, 3]
    replaced = client.get_run(before.info.run_id)
    assert (replaced.info.lifecycle_stage, replaced.data.tags["slurmtrain.replaced_by"]) == (
        "deleted",
        after.info.run_id,
    )
    send(workspace)
    assert [run.info.run_id for run in shown()] == [after.info.run_id]


def test_newest_and_best_checkpoint_are_tags_until_they_are_deleted(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]]
) -> None:
    sim = add(checkpoint={"keep": {"best": {"metric": "loss"}}})
    sim.started().reached(2).saved(1, metrics={"loss": 0.1}).saved(2, metrics={"loss": 0.2})
    send(workspace)
    [run] = shown()
    tags = {name: run.data.tags[f"slurmtrain.checkpoint.{name}.step"] for name in ("newest", "best")}
    assert tags == {"newest": "2", "best": "1"}
    path = workspace.root.run("0123456789").checkpoints / "step-2"
    assert run.data.tags["slurmtrain.checkpoint.newest.path"] == str(path)


def test_what_nodes_measure_is_shown_by_node_and_step_once(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]], store: str
) -> None:
    sim = add().started(nodes=2).reached(9)
    attempt = AttemptDir(workspace.root.run("0123456789").attempts / "0123456789.0")
    attempt.logs.mkdir()

    def measure(node: int, at: float, **line: Any) -> None:
        with attempt.system_metrics(node).open("a") as file:
            file.write(json.dumps({"t": at, **line, "metrics": {"cpu_utilization_percentage": at % 100}}) + "\n")

    measure(0, 1020.0)
    measure(0, 1035.0, step=7)
    measure(1, 1036.0, step=7)
    send(workspace)
    measure(0, 1050.0, step=9)
    sim.ended("completed").ended("completed", 1)
    send(workspace)
    [run] = shown()
    client = mlflow.MlflowClient(store)
    history = client.get_metric_history(run.info.run_id, "system/n0/cpu_utilization_percentage")
    started = sim.newest.started_at or 0.0
    assert [(each.step, each.timestamp) for each in history] == [
        (int(1020 - started), 1_020_000), (7, 1_035_000), (9, 1_050_000)
    ]  # fmt: skip
    assert run.data.metrics["system/n1/cpu_utilization_percentage"] == 36.0


def test_spec_plan_changes_and_environment_are_artifacts_and_a_store_without_room_for_them_is_noted_once(
    workspace: Workspace, add: Add, shown: Callable[[], list[Any]], store: str, request: pytest.FixtureRequest
) -> None:
    client = mlflow.MlflowClient(store)
    sim = add().started().reached(1)
    directory = workspace.root.run("0123456789")
    directory.spec.write_text("command: python x.py\n")
    directory.code_difference.write_text("+width = 128\n")
    directory.environment.write_text("torch==2.13\n")
    send(workspace)
    [run] = shown()
    files = [file.path for file in client.list_artifacts(run.info.run_id, "slurmtrain")]
    assert files == [f"slurmtrain/{name}" for name in ("code.diff", "environment.txt", "plan.json", "spec.yaml")]
    nowhere = f"nowhere {request.node.name}"
    client.create_experiment(nowhere, artifact_location="file:///proc/nowhere")
    add("0123456788", tracking={"mlflow": {"experiment": nowhere}}).started().reached(1)
    add("0123456787", tracking={"mlflow": {"experiment": nowhere}}).started().reached(1)
    [note] = send(workspace).notes
    assert "does not take files of runs" in note
    sim.ended("completed")
    assert send(workspace).notes == []
