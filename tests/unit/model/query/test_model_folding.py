"""The runs of a sweep as one line."""

from __future__ import annotations

import math

from slurmtrain.model.query.folding import best_metrics, count_states


def test_states_are_counted_with_what_somebody_may_have_to_look_at_first() -> None:
    states = ["completed"] * 3 + ["pending", "running", "failed", "running"]
    assert count_states(states) == "1 failed, 2 running, 1 pending, 3 completed"


def test_the_best_value_of_a_metric_is_as_its_name_shows() -> None:
    runs = [{"acc": 0.9, "loss": 0.5, "x": 1}, {"acc": 0.7, "loss": math.nan}, {}]
    assert best_metrics(runs) == {"acc": 0.9, "loss": 0.5}
