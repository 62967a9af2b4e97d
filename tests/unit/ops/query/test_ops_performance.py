"""What a run's directory says of how fast it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import write_run
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.errors import RunNotFound
from slurmtrain.ops.query.performance import (
    Performance,
    PerformanceAnswer,
    choose_baseline,
    compare_performance,
    compare_performance_of,
)
from slurmtrain.ops.query.select import Question
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_measures import Measures
from slurmtrain.ops.shared.workspace import Workspace

GIB = 2**30


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "runs")


def answered(workspace: Workspace, *names: str, baseline: str | None = None) -> PerformanceAnswer:
    question = Question(names=names, namesakes=True, for_programs=True)
    return compare_performance_of(workspace, observe(workspace, ask_slurm=False).runs, question, baseline)


def rows(workspace: Workspace, *names: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in answered(workspace, *names).to_json()["runs"]}


def workers(sim: SimulatedRun, node: int, ranks: range, ranks_each: int = 1) -> None:
    process = {"host": "h", "boot": "b", "pid": 1, "start": 1}
    sim.node("workers", node, 0, processes={str(rank): process for rank in ranks}, ranks_each=ranks_each)


def trained(workspace: Workspace, number: int, name: str, ranks: int, step_s: float, **facts: Any) -> SimulatedRun:
    """A run on a node with this many ranks, which has finished 40 steps of 8 samples. ``facts``: as for write_run."""
    sim = write_run(workspace, number, name, state="running", **facts)
    workers(sim, 0, range(ranks))
    sim.rank("total", total_steps=1000)
    began = sim.now
    for step in range(1, 41):
        sim.reached(step, at=began + step * step_s, loss=1.0)
    sim.later(40 * step_s)
    for rank in range(ranks):
        peak = {"peak_bytes": (rank + 1) * GIB, "memory": "process"}
        sim.rank("measured", rank, steps=40, samples=320, epoch_samples=80, **peak)
    return sim


def note_system(sim: SimulatedRun, node: int, *lines: tuple[float, dict[str, float]]) -> None:
    path = sim.directory.attempt(sim.job, 0).system_metrics(node)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"t": at, "metrics": metrics}) + "\n" for at, metrics in lines))


def test_runs_are_compared_with_the_one_with_the_fewest_processes(workspace: Workspace) -> None:
    trained(workspace, 1, "four", 4, 0.5).ended("completed")
    trained(workspace, 2, "alone", 1, 1.0).ended("completed")
    answer = answered(workspace)
    assert answer.baseline.name == "alone"
    alone, four = answer.to_json()["runs"]
    assert alone["steps_per_second"] == pytest.approx(1.0)
    assert alone["samples_per_second"] == pytest.approx(8.0)
    assert alone["epoch_seconds"] == pytest.approx(10.0)
    assert alone["total_seconds"] == pytest.approx(1000.0)
    assert (alone["nodes"], alone["processes"], alone["gpus"]) == (1, 1, 0)
    # The rank that needs the most.
    assert (four["memory_bytes"], four["memory"]) == (4 * GIB, "process")
    assert (four["speedup"], four["of_ideal"]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert four["hours_per_1000_steps"] == pytest.approx(4 * 500 / 3600)


def test_utilization_is_that_of_the_gpus_while_it_trained(workspace: Workspace) -> None:
    sim = trained(workspace, 1, "gpus", 2, 1.0)
    during = sim.now - 20
    use = "gpu_0_utilization_percentage", "gpu_1_utilization_percentage"
    note_system(
        sim,
        0,
        (during - 100, {use[0]: 1.0, "cpu_utilization_percentage": 5.0}),
        (
            during,
            {use[0]: 90.0, use[1]: 70.0, "gpu_0_memory_usage_megabytes": 900.0, "cpu_utilization_percentage": 5.0},
        ),
        (during + 15, {use[0]: 80.0, use[1]: 80.0, "gpu_1_memory_usage_megabytes": 1200.0}),
    )
    [row] = answered(workspace).to_json()["runs"]
    assert row["utilization"] == pytest.approx(80.0)
    # No rank has noted what torch had allocated: all that was used of the GPU.
    assert (row["memory_bytes"], row["memory"]) == (1_200_000_000, "device")
    assert row["gpus"] == 2


def test_what_torch_had_allocated_comes_before_what_the_driver_says(workspace: Workspace) -> None:
    sim = write_run(workspace, 1, "gpt", state="running")
    workers(sim, 0, range(1))
    sim.rank("measured", 0, peak_bytes=3 * GIB, memory="gpu")
    note_system(sim, 0, (sim.now, {"gpu_0_memory_usage_megabytes": 9000.0}))
    [row] = answered(workspace).to_json()["runs"]
    assert (row["memory_bytes"], row["memory"], row["gpus"]) == (3 * GIB, "gpu", 1)


def test_the_start_of_ranks_with_the_most_steps_counts_with_its_own_nodes(workspace: Workspace) -> None:
    sim = write_run(workspace, 1, "lost-a-node", state="running")
    workers(sim, 0, range(2))
    workers(sim, 1, range(2, 4))
    began = sim.now
    for step in range(1, 31):
        sim.reached(step, at=began + step)
    sim.later(40).node("restart", 0, 0, round=1, members=[0], cause="node_fail", why="", failures=[], lost=[1])
    workers(sim, 0, range(2))
    for step in range(31, 36):
        sim.reached(step, at=sim.now + step)
    [row] = answered(workspace).to_json()["runs"]
    assert (row["nodes"], row["processes"]) == (2, 4)
    assert row["steps_per_second"] == pytest.approx(1.0)
    began = sim.now + 100
    for step in range(36, 101):
        sim.reached(step, at=began + 2 * step)
    [row] = answered(workspace).to_json()["runs"]
    assert (row["nodes"], row["processes"]) == (1, 2)


def test_ranks_that_a_command_has_started_are_counted(workspace: Workspace) -> None:
    sim = write_run(workspace, 1, "torchrun", state="running")
    workers(sim, 0, range(1), ranks_each=8)
    assert rows(workspace)["torchrun"]["processes"] == 8


def test_the_gpus_of_components_are_those_of_all_their_nodes(workspace: Workspace) -> None:
    components = [{"nodes": 1, "gpus_per_node": 4}, {"nodes": 1, "gpus_per_node": 2}]
    sim = write_run(workspace, 1, "unequal", state="running", resources={"gpus_per_node": 0, "components": components})
    workers(sim, 0, range(4))
    workers(sim, 1, range(4, 6))
    assert rows(workspace)["unequal"]["gpus"] == 6


def test_what_is_not_recorded_is_unknown_and_a_sentence_says_why(workspace: Workspace) -> None:
    write_run(workspace, 1, "plain", state="created")
    trained(workspace, 2, "alone", 1, 1.0)
    answer = answered(workspace)
    row = next(each for each in answer.to_json()["runs"] if each["name"] == "plain")
    assert {name for name, value in row.items() if value is None} == {
        "nodes", "processes", "steps_per_second", "rate_error", "samples_per_second", "epoch_seconds", "total_seconds",
        "memory_bytes", "memory", "utilization", "hours_per_1000_steps", "speedup", "of_ideal", "step_p50_s",
        "step_p95_s", "tokens_per_second", "data_wait_share", "communication_share", "gpu_utilization", "gpu_power_w",
        "energy_kwh", "mfu",
    }  # fmt: skip
    assert "no samples per second for 1 of 2 runs: only run.loader() and run.share() count samples" in answer.notes
    assert [note for note in answer.notes if note.startswith("no utilization for 2 of 2 runs: ")]


def test_a_baseline_may_be_any_run(workspace: Workspace) -> None:
    trained(workspace, 1, "alone", 1, 1.0)
    trained(workspace, 2, "two", 2, 0.5)
    answer = answered(workspace, "two", baseline="alone")
    assert [each.name for each in answer.runs] == ["alone", "two"]
    assert [each.speedup for each in answer.runs] == pytest.approx([1.0, 2.0])
    with pytest.raises(RunNotFound):
        answered(workspace, "two", baseline="nobody")


def run(name: str, **facts: Any) -> Performance:
    return Performance(id=name, name=name, state="completed", measures=Measures(**facts))


def test_the_speedup_is_in_samples_and_the_ideal_in_gpus() -> None:
    alone = run("alone", processes=1, gpus=1, steps_per_second=2.0, samples_per_second=64.0)
    four = run("four", processes=4, gpus=4, steps_per_second=1.5, samples_per_second=192.0)
    both = compare_performance([four, alone], choose_baseline([four, alone]))
    assert [(each.name, each.speedup, each.of_ideal) for each in both] == [
        ("alone", 1.0, 1.0),
        ("four", 3.0, 0.75),
    ]


def test_a_single_process_with_four_gpus_is_four_gpus() -> None:
    alone = run("alone", processes=1, gpus=1, steps_per_second=1.0)
    data_parallel = run("dp", processes=1, gpus=4, steps_per_second=2.0)
    assert compare_performance([data_parallel], alone)[0].of_ideal == 0.5
    assert data_parallel.hours_per_1000_steps == pytest.approx(4 * 500 / 3600)


def test_without_samples_of_both_steps_are_compared() -> None:
    alone = run("alone", processes=1, steps_per_second=1.0)
    two = run("two", processes=2, steps_per_second=1.8, samples_per_second=9.0)
    assert compare_performance([two], alone)[0].speedup == pytest.approx(1.8)
    assert compare_performance([two], alone)[0].of_ideal == pytest.approx(0.9)


def test_what_is_not_known_has_no_speedup_and_is_no_baseline() -> None:
    unknown, alone = run("unknown"), run("alone", processes=1, steps_per_second=1.0)
    assert choose_baseline([unknown, alone]) == alone
    assert choose_baseline([unknown]) == unknown
    last = compare_performance([unknown, alone], alone)[-1]
    assert last == unknown
    assert unknown.hours_per_1000_steps is None
