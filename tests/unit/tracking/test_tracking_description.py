"""What MLflow shows of a run apart from its metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.model.experiment.checkpoint import BestSpec
from slurmtrain.model.run.run import Checkpoint, Run
from slurmtrain.tracking.to_mlflow import sending
from slurmtrain.tracking.to_mlflow.sending import Origin


def make_run(**fields: Any) -> Run:
    defaults: dict[str, Any] = {
        "id": "0123456789",
        "name": "digits",
        "state": "running",
        "reason": "",
        "executor": "local",
    }
    return Run(**(defaults | fields))


def test_a_run_of_a_sweep_is_named_for_what_varies_and_another_for_its_id() -> None:
    origin = Origin(varies={"params.lr": 0.1, "checkpoint.every": {"steps": 10}})
    spec = {"params": {"lr": 0.5}}
    assert sending.run_name(make_run(), origin, spec) == 'digits lr=0.5 checkpoint.every={"steps": 10}'
    assert sending.run_name(make_run(), Origin(), spec) == "digits-0123456789"


@pytest.mark.parametrize(
    ("command", "source"),
    [
        ("python experiments/digits/train.py --lr 0.1", "experiments/digits/train.py"),
        ("torchrun --nproc-per-node 2 -m nano.train", "nano.train"),
        ("./simulate -n 4", "./simulate"),
    ],
)
def test_the_source_of_a_run_is_its_script_or_module_else_its_program(command: str, source: str) -> None:
    assert sending.source_of(command) == source


def test_time_in_the_queue_adds_up_over_the_attempts() -> None:
    sim = SimulatedRun(executor="slurm").submitted().later(60).started().stopped().later(30).started(restart=1)
    [first, second] = sending.queue_times(sim.run)
    assert (first.step, second.step) == (1, 2)
    assert 60 < first.value < second.value < 120


def test_values_of_params_in_earlier_attempts_are_tags_where_they_were_new() -> None:
    history = [
        (1, {"lr": "0.1", "a": "1"}),
        (2, {"lr": "0.1", "a": "1"}),
        (4, {"lr": "0.2", "a": "1"}),
        (5, {"lr": "0.3", "a": "1"}),
    ]
    assert sending.former_params(history) == {
        "slurmtrain.attempt_1.params.lr": "0.1",
        "slurmtrain.attempt_4.params.lr": "0.2",
    }
    assert sending.former_params([]) == {}


def test_the_best_checkpoint_is_the_best_of_those_on_disk_by_the_metric_of_the_spec() -> None:
    def saved(step: int, loss: float, pruned_at: float | None = None) -> Checkpoint:
        return Checkpoint(step, f"checkpoints/step-{step}", 1, 1.0, None, metrics={"loss": loss}, pruned_at=pruned_at)

    run = make_run(checkpoints=[saved(1, 0.1, 5.0), saved(2, 0.2), saved(3, 0.2), saved(4, math.nan), saved(5, 0.4)])
    for mode, step in (("min", 3), ("max", 5)):
        best = sending.best_checkpoint(run, BestSpec(metric="loss", mode=mode))
        assert best.step == step
    assert sending.best_checkpoint(run, None) is None
    assert sending.best_checkpoint(run, BestSpec(metric="accuracy")) is None
