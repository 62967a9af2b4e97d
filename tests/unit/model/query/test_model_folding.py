"""The runs of a sweep as one line."""

from __future__ import annotations

import math

from slurmtrain.model.query.folding import best_metrics, count_states, describe_sweep


def test_states_are_counted_with_what_somebody_may_have_to_look_at_first() -> None:
    states = ["completed"] * 3 + ["pending", "running", "failed", "running"]
    assert count_states(states) == "1 failed, 2 running, 1 pending, 3 completed"


def test_the_best_value_of_a_metric_is_as_its_name_shows() -> None:
    runs = [{"acc": 0.9, "loss": 0.5, "x": 1}, {"acc": 0.7, "loss": math.nan}, {}]
    assert best_metrics(runs) == {"acc": 0.9, "loss": 0.5}


def test_a_sweep_is_described_by_states_and_best_values() -> None:
    metrics = {"failed": {"acc": 0.123456789, "odd": 1}, "completed": {"acc": 0.9, "loss": 2.0}, "running": {"loss": 1}}
    runs = [{"sweep": "s", "state": state, "metrics": values} for state, values in metrics.items()]
    assert describe_sweep(runs) == "sweep s: 1 failed, 1 running, 1 completed; best acc=0.9, loss=1"
    assert describe_sweep([{**runs[0], "metrics": {}}]) == "sweep s: 1 failed"
