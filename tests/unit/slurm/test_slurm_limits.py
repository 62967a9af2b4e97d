"""Requests that no partition could ever satisfy are told before anything is created; those that one may are not."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.plan import Plan, make_plan
from slurmtrain.model.spec import read_spec
from slurmtrain.slurm.limits import impossible
from slurmtrain.slurm.parse import read_partitions

PARTITIONS = read_partitions(
    "PartitionName=spot Default=YES MaxNodes=UNLIMITED MaxTime=04:00:00 TotalNodes=4 TRES=cpu=32,node=4,gres/gpu=8\n"
    "PartitionName=long Default=NO MaxNodes=2 MaxTime=7-00:00:00 TotalNodes=4 TRES=cpu=32,node=4\n"
    "PartitionName=free Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=64 TRES=cpu=512,node=64\n"
)


def plan(slurm: dict[str, Any] | None = None, **resources: Any) -> Plan:
    data = {"name": "x", "command": "python train.py", "slurm": slurm or {}, "resources": resources}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    return make_plan(spec, workdir="/w", python="/usr/bin/python3", template=data)[0]


@pytest.mark.parametrize(
    "resources", [{}, {"nodes": 4, "gpus_per_node": 2, "time": "04:00:00"}, {"nodes": 1, "gpus_per_node": 8}]
)
def test_what_the_default_partition_can_run_is_possible(resources: dict[str, Any]) -> None:
    assert impossible(plan(**resources), PARTITIONS) is None


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"nodes": 5}, "resources.nodes: partition spot gives a job 4 nodes at most, not 5"),
        ({"nodes": 3, "gpus_per_node": 3}, "resources.gpus_per_node: partition spot has 8 GPUs, not 9"),
        ({"time": "04:00:01"}, "resources.time: partition spot lets a job run for 04:00:00 at most"),
    ],
)
def test_what_the_default_partition_can_never_run_is_told(resources: dict[str, Any], reason: str) -> None:
    assert impossible(plan(**resources), PARTITIONS) == reason


def test_a_partition_that_is_not_there_is_told_with_the_one_that_was_meant() -> None:
    reason = impossible(plan({"partition": "spto"}), PARTITIONS)
    assert reason is not None
    assert reason.startswith("slurm.partition: there is no partition 'spto'")
    assert "'spot'" in reason
    assert reason.endswith("there are free, long, spot")


def test_a_partition_may_give_a_job_fewer_nodes_than_it_has() -> None:
    assert impossible(plan({"partition": "long"}, nodes=2), PARTITIONS) is None
    reason = impossible(plan({"partition": "long"}, nodes=3), PARTITIONS)
    assert reason == "resources.nodes: partition long gives a job 2 nodes at most, not 3"


def test_one_of_several_partitions_is_enough() -> None:
    assert impossible(plan({"partition": "spot, long"}, time="1-0"), PARTITIONS) is None


def test_what_none_of_several_partitions_can_run_is_told_of_each() -> None:
    reason = impossible(plan({"partition": "spot,long"}, nodes=3, time="1-0"), PARTITIONS)
    assert reason == (
        "resources.time: partition spot lets a job run for 04:00:00 at most; "
        "resources.nodes: partition long gives a job 2 nodes at most, not 3"
    )


def test_a_qos_may_allow_more_time_than_the_partition() -> None:
    assert impossible(plan({"qos": "long"}, time="1-0"), PARTITIONS) is None


def test_a_partition_without_limits_runs_for_any_time() -> None:
    assert impossible(plan({"partition": "free"}, nodes=64, time="30-0"), PARTITIONS) is None


def test_gpus_that_a_partition_does_not_count_are_left_to_sbatch() -> None:
    assert impossible(plan({"partition": "long"}, gpus_per_node=8), PARTITIONS) is None


@pytest.mark.parametrize("partitions", [{}, {"p": {"PartitionName": "p"}}, {"p": {"Default": "YES"}}])
def test_where_nothing_is_known_of_the_default_partition_anything_may_be_possible(
    partitions: dict[str, dict[str, str]],
) -> None:
    assert impossible(plan(nodes=1000, gpus_per_node=8, time="300-0"), partitions) is None
