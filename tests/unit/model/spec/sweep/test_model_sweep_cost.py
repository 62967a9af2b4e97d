"""What runs may cost: time limit x nodes x GPUs, and when that is worth a question."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.resources import ResourcesSpec
from slurmtrain.model.spec.sweep import SweepCost, cost_of
from slurmtrain.model.spec.values import Nodes


def test_spare_nodes_and_the_most_of_a_range_count() -> None:
    first = ResourcesSpec(nodes=Nodes(2, 4), spares=1, gpus_per_node=8, time=1800)
    second = ResourcesSpec(nodes=Nodes(1, 1), time=7200)
    assert cost_of([first, second]) == SweepCost(runs=2, node_hours=4.5, gpu_hours=20.0, without_limit=0)


def test_runs_without_a_time_limit_are_in_no_sum() -> None:
    unlimited, limited = ResourcesSpec(gpus_per_node=8), ResourcesSpec(gpus_per_node=1, time=3600)
    assert str(cost_of([unlimited])) == "1 run without a time limit"
    assert str(cost_of([unlimited, limited])) == (
        "2 runs, at most 1.0 GPU-hours and 1.0 node-hours per attempt, and 1 of them without a time limit"
    )


@pytest.mark.parametrize(
    ("runs", "gpu_hours", "key"),
    [(10, 100.0, ""), (11, 1.0, "sweep_confirm_runs"), (10, 100.1, "sweep_confirm_gpu_hours")],
)
def test_what_exceeds_a_limit_names_its_key(runs: int, gpu_hours: float, key: str) -> None:
    excess = SweepCost(runs, 1.0, gpu_hours, 0).excess(10, 100)
    assert bool(excess) == bool(key)
    assert key in excess
