"""What a run's directory says of the speed of its steps and ranks, and of the energy that it took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import write_run
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.model.query.fields import value_of
from slurmtrain.ops.shared.node_use import read_load
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_measures import measure_run
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

MEASURED = {
    "steps": 40, "samples": 320, "peak_bytes": 2**30, "memory": "gpu", "step_p50_s": 0.9, "step_p95_s": 1.4,
    "own_p50_s": 0.5, "data_wait_share": 0.1, "communication_share": 0.2, "tokens_per_sample": 100,
    "flops_per_sample": 1e12, "peak_flops": 1e13,
}  # fmt: skip


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "runs")


def trained(workspace: Workspace, ranks: int = 2, steps: int = 40) -> SimulatedRun:
    """A run with a step each second, whose last took ten."""
    sim = write_run(workspace, 1, "gpt", state="running")
    process = {"host": "h", "boot": "b", "pid": 1, "start": 1}
    sim.node("workers", 0, 0, processes={str(rank): process for rank in range(ranks)})
    sim.rank("total", total_steps=1000)
    began = sim.now
    for step in range(1, steps + 1):
        sim.reached(step, at=began + step)
    sim.later(steps)
    return sim


def measures(workspace: Workspace, sim: SimulatedRun) -> dict[str, Any]:
    observe(workspace, ask_slurm=False)
    [run] = workspace.store.load_all([sim.directory.id]).values()
    facts = measure_run(run, workspace.root.run(run.id)).to_dict()
    json.dumps(facts, allow_nan=False)
    return facts


def test_what_ranks_have_noted_last_counts_each_with_its_node(workspace: Workspace) -> None:
    sim = trained(workspace)
    for rank in range(2):
        sim.rank("measured", rank, **{**MEASURED, "steps": 10, "samples": 80, "step_p50_s": 5.0})
        sim.rank("measured", rank, **{**MEASURED, "data_wait_share": 0.1 + rank / 10, "own_p50_s": 0.5 + rank / 10})
    facts = measures(workspace, sim)
    assert (facts["steps_per_second"], facts["samples_per_second"]) == pytest.approx((1.0, 8.0))
    assert (facts["step_p50_s"], facts["step_p95_s"]) == (0.9, 1.4)
    assert facts["tokens_per_second"] == pytest.approx(800)
    assert facts["data_wait_share"] == pytest.approx(0.15)
    assert facts["communication_share"] == pytest.approx(0.2)
    # 8 samples of 1 TFLOP in a second, and two GPUs with 10 TFLOP/s.
    assert facts["mfu"] == pytest.approx(8 / 20)
    assert (facts["peak_memory_bytes"], facts["memory"]) == (2**30, "gpu")
    [first, second] = facts["ranks"]
    assert (first["rank"], first["own_p50_s"], second["rank"], second["own_p50_s"]) == (0, 0.5, 1, 0.6)
    assert first["node"] == second["node"]
    assert first["node"] is not None
    assert second["peak_memory_bytes"] == 2**30
    assert facts["slow_ranks"] == []
    sim.rank("measured", 1, **{**MEASURED, "own_p50_s": 0.8})
    assert measures(workspace, sim)["slow_ranks"] == [1]


def test_steps_that_a_profiler_has_recorded_do_not_count_in_the_pace(workspace: Workspace) -> None:
    sim = trained(workspace)
    sim.rank("measured", 0, **MEASURED, profiled_steps=3, profiled_s=21.0)
    assert measures(workspace, sim)["steps_per_second"] == pytest.approx((39 - 3) / (39 - 21))


def test_a_run_that_has_noted_nothing_has_its_times_and_nothing_else(workspace: Workspace) -> None:
    facts = measures(workspace, trained(workspace))
    assert {name: value for name, value in facts.items() if value is not None} == {
        "nodes": 1, "processes": 2, "gpus": 0, "steps_per_second": pytest.approx(1.0), "step_p50_s": pytest.approx(1.0),
        "rate_error": pytest.approx(0.0), "step_p95_s": pytest.approx(1.0), "total_seconds": pytest.approx(1000),
        "ranks": [], "slow_ranks": [],
    }  # fmt: skip


def test_lists_of_runs_can_show_them(workspace: Workspace) -> None:
    sim = trained(workspace)
    sim.rank("measured", 0, **MEASURED)
    assert sim.directory is not None
    listed = observe(workspace, ask_slurm=False).runs[sim.directory.id]
    record = RunRecord(workspace, listed)
    assert value_of(record, "measures.communication_share") == 0.2
    # Not in what status --json prints of each run, since many files would have to be read.
    assert "measures" not in dict(record)


def test_the_mfu_of_devices_that_are_not_known_is_unknown(workspace: Workspace) -> None:
    sim = trained(workspace)
    sim.rank("measured", 0, **MEASURED)
    sim.rank("measured", 1, **{**MEASURED, "peak_flops": None})
    assert measures(workspace, sim)["mfu"] is None


def note_system(sim: SimulatedRun, restart: int, *lines: tuple[float, dict[str, float]]) -> None:
    path = sim.directory.attempt(sim.job, restart).system_metrics(0)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({"t": at, "metrics": metrics}) + "\n" for at, metrics in lines))


def test_power_is_that_while_it_trained_and_energy_that_of_all_attempts(workspace: Workspace) -> None:
    sim = trained(workspace)
    at = sim.now - 30
    counted = "gpu_0_energy_joules", "gpu_1_energy_joules"
    power = "gpu_0_power_usage_watts"
    # Ranks were started again after the second line: the counters begin again.
    note_system(
        sim, 0,
        (at, {counted[0]: 3.6e6, counted[1]: 1e6, power: 300.0, "gpu_0_utilization_percentage": 80.0}),
        (at + 10, {counted[0]: 7.2e6, counted[1]: 2e6, power: 500.0, "gpu_0_utilization_percentage": 90.0}),
        (at + 500, {counted[0]: 1e6, counted[1]: 1.6e6, power: 100.0, "gpu_0_utilization_percentage": 1.0}),
    )  # fmt: skip
    facts = measures(workspace, sim)
    assert facts["energy_kwh"] == pytest.approx((7.2e6 + 2e6 + 1e6 + 1.6e6) / 3.6e6)
    assert (facts["gpu_power_w"], facts["gpu_utilization"], facts["utilization"]) == (400.0, 85.0, 85.0)


def test_without_gpus_only_the_processors_are_known(workspace: Workspace) -> None:
    sim = trained(workspace)
    note_system(sim, 0, (sim.now - 10, {"cpu_utilization_percentage": 70.0}))
    facts = measures(workspace, sim)
    assert (facts["utilization"], facts["gpu_utilization"], facts["energy_kwh"]) == (70.0, None, None)


# --- scripts without the library --------------------------------------------------------------------------------------


def test_of_a_script_the_steps_that_it_prints_count_and_not_its_lines(workspace: Workspace) -> None:
    sim = write_run(workspace, 1, "plain", state="running")
    assert sim.directory is not None
    attempt = sim.directory.attempt(sim.job, 0)
    lines = "".join(
        json.dumps({"t": sim.now + step, "step": step, "metrics": {"loss": 1.0}}) + "\n" for step in range(9)
    )
    attempt.guessed_metrics.write_text(lines)
    sim.write(f"attempts/{sim.job}.0/script.jsonl", "script_guess", counted=True)
    assert measures(workspace, sim)["steps_per_second"] is None
    sim.write(f"attempts/{sim.job}.0/script.jsonl", "script_guess", counted=False)
    facts = measures(workspace, sim)
    assert (facts["steps_per_second"], facts["step_p50_s"]) == pytest.approx((1.0, 1.0))


def test_of_long_files_of_nodes_a_part_is_read_with_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "system-0.jsonl"
    path.write_text("".join(json.dumps({"t": at, "metrics": {"x": 1.0}}) + "\n" for at in range(1003)))
    assert [sample.time for sample in read_load(path, 100)] == list(range(1, 1003, 11))
    assert [sample.time for sample in read_load(path, 2000)] == list(range(1003))
