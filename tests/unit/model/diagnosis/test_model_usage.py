"""What runs asked for against what they used, in figures and in words."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.diagnosis.node_load import LoadSample
from slurmtrain.model.diagnosis.usage import Elapsed, NodeUse, Usage, judge_usage, use_of_node
from slurmtrain.model.experiment.values import parse_duration, parse_memory

GIB = 1 << 30
REQUEST: dict[str, Any] = {
    "nodes": 2, "procs_per_node": 4, "gpus_per_node": 4, "cpus_per_proc": 8, "mem": "65536M", "time": "24:00:00",
    "components": None,
}  # fmt: skip
NODE = NodeUse(
    samples=100,
    memory_bytes=9.8 * GIB,
    cores=6.4,
    busy_cores=10.5,
    gpus_used=4,
    utilization=0.87,
    gpu_memory_bytes=40 * GIB,
)
COMPLETED = Elapsed(longest=4000.0, total=9000.0, to_go=None, is_completed=True, causes=["preempted", "completed"])
RUNNING = Elapsed(longest=4000.0, total=4000.0, to_go=8000.0, is_completed=False)
FAILED = Elapsed(longest=4000.0, total=4000.0, to_go=None, is_completed=False, causes=["crash"])


def judge(*nodes: NodeUse, elapsed: Elapsed = COMPLETED, **resources: Any) -> dict[str, Usage]:
    return {each.resource: each for each in judge_usage({**REQUEST, **resources}, nodes or [NODE], elapsed)}


def test_a_run_that_asked_for_too_much_has_the_request_that_would_have_sufficed() -> None:
    usage = judge(NODE, NodeUse(samples=90, memory_bytes=2.0 * GIB, cores=9.0, busy_cores=3.0))
    memory, cpus, gpus, time = usage.values()
    assert (memory.requested, memory.used, memory.suffices, memory.unit) == (64 * GIB, 9.8 * GIB, 12 * GIB, "bytes")
    assert memory.why == "at most 9.8GB of 64GB of a node was in use: mem: 12GB would have sufficed"
    assert (cpus.requested, cpus.used, cpus.suffices, cpus.request) == (32, 9.0, 12, "cpus_per_proc: 3")
    assert cpus.why.endswith("and rarely more than 10.5: cpus_per_proc: 3 would have sufficed")
    assert (gpus.requested, gpus.used, gpus.suffices, gpus.utilization) == (4, 4, 4, 0.87)
    assert gpus.why == "4 of 4 GPUs of a node were used, 87 % of the time, with at most 40GB of their memory"
    assert (time.requested, time.used, time.suffices, time.request) == (86_400, 4000.0, 5400, 'time: "01:30:00"')
    assert time.why.startswith("the longest attempt ran for 1 h 6 min of 24 h: ")
    assert (memory.margin, time.margin, cpus.margin) == (0.2, 0.25, 0.0)


def test_a_request_that_fits_needs_no_advice_and_one_that_is_too_small_is_said_to_be() -> None:
    usage = judge(mem="13GB", cpus_per_proc=3, time="01:30:00")
    assert not [each.why for each in usage.values() if "would" in each.why]
    usage = judge(mem="10GB", cpus_per_proc=2)
    assert usage["memory"].why.endswith("mem: 12GB would be needed")
    assert usage["cpus"].why.endswith("cpus_per_proc: 3 would be needed")
    usage = judge(NodeUse(samples=9, gpus_used=1, utilization=0.2))
    assert (usage["gpus"].suffices, usage["gpus"].request) == (1, "gpus_per_node: 1")
    # A longer limit would have been one attempt.
    usage = judge(elapsed=Elapsed(longest=4000.0, total=9000.0, to_go=None, is_completed=True, causes=["timeout"]))
    assert usage["time"].request == 'time: "03:15:00"'


def test_nobody_knows_what_suffices_for_a_run_that_ended_early_or_has_just_begun() -> None:
    for elapsed in (FAILED, Elapsed(longest=10.0, total=10.0, to_go=None, is_completed=False)):
        usage = judge(elapsed=elapsed)
        assert [each.suffices for each in usage.values()] == [None] * 4
        assert [each.used for each in usage.values()] == [9.8 * GIB, 6.4, 4, elapsed.longest]
    short = judge(NodeUse(samples=2, memory_bytes=GIB))
    assert (short["memory"].used, short["memory"].suffices, short["cpus"].why) == (GIB, None, "")
    assert short["time"].suffices is not None
    running = judge(elapsed=RUNNING)["time"]
    assert running.request == 'time: "04:15:00"'
    assert running.why.startswith("the longest attempt ran for 1 h 6 min of 24 h, and 2 h 13 min are to go")
    out = judge(elapsed=Elapsed(longest=5.0, total=5.0, to_go=None, is_completed=True, causes=["oom", "completed"]))
    assert (out["memory"].why, out["memory"].suffices) == ("it ran out of memory with 64GB", None)


def test_what_was_not_asked_for_has_no_request_to_compare_with() -> None:
    nothing = judge_usage({}, [], Elapsed(longest=None, total=0.0, to_go=None, is_completed=False))
    assert [(each.requested, each.used, each.why) for each in nothing] == [
        (None, None, ""), (None, None, ""), (0, None, ""), (None, None, "")
    ]  # fmt: skip
    usage = judge(mem="0", time=None, gpus_per_node=0, procs_per_node=None)
    assert (usage["memory"].requested, usage["time"].requested, usage["cpus"].requested) == (None, None, 8)
    assert (usage["gpus"].used, usage["gpus"].why) == (None, "")
    assert usage["memory"].why == "at most 9.8GB of a node was in use: mem: 12GB would have sufficed"
    # Components ask for different nodes.
    apart = judge(components=[{"nodes": 1, "gpus_per_node": 4}])
    assert [each.requested for each in apart.values()] == [None, None, 0, None]


@pytest.mark.parametrize("gib", [0.01, 0.3, 1.7, 6.0, 20.0, 100.0, 800.0])
def test_requests_are_what_specs_read_with_room_for_the_margin(gib: float) -> None:
    usage = judge(NodeUse(samples=9, memory_bytes=gib * GIB))["memory"]
    assert usage.request is not None
    assert usage.suffices is not None
    assert parse_memory(usage.request.removeprefix("mem: ")) << 20 == usage.suffices
    assert 1.2 * gib <= usage.suffices / GIB <= max(1.2 * gib * 1.25, 0.125)
    time = judge(elapsed=Elapsed(longest=gib * 1000, total=0.0, to_go=None, is_completed=True))["time"]
    assert time.request is not None
    assert parse_duration(time.request.removeprefix("time: ").strip('"')) == time.suffices


def test_samples_of_a_node_are_summed_up() -> None:
    samples = [
        LoadSample(
            float(second),
            None,
            {
                "job_memory_usage_megabytes": 1000.0 + second,
                "job_cpu_cores": 32.0 if second == 50 else 2.0,
                "gpu_0_utilization_percentage": 80.0,
                "gpu_1_utilization_percentage": 0.0,
                "gpu_0_memory_usage_megabytes": 500.0,
            },
        )
        for second in range(100)
    ]
    use = use_of_node(samples)
    assert (use.samples, use.memory_bytes, use.cores, use.busy_cores) == (100, 1.099e9, 2.3, 2.0)
    assert (use.gpus_used, use.utilization, use.gpu_memory_bytes) == (1, 0.4, 5e8)
    assert use_of_node([]) == NodeUse(samples=0)
