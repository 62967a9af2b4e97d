"""What a node notes of itself: how busy it is, and the sizes of logs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.site import until

from slurmtrain.runtime.agent.gauges import EnergyMeter, Gauges, OwnUse
from slurmtrain.runtime.agent.monitor import LogSizes, Sampler
from slurmtrain.system.process import use_of


class NVMLError(Exception):
    """What NVML raises."""


def make_nvml() -> Any:
    """NVML with two GPUs, of which the second is part of one: it has no utilization. ``sessions``: those not ended."""
    nvml = SimpleNamespace(NVMLError=NVMLError, sessions=0)

    def count(sessions: int) -> None:
        nvml.sessions += sessions

    def utilization(handle: int) -> Any:
        if handle:
            raise NVMLError
        return SimpleNamespace(gpu=93)

    nvml.nvmlInit = lambda: count(1)
    nvml.nvmlShutdown = lambda: count(-1)
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=20e9, total=80e9)
    nvml.nvmlDeviceGetUtilizationRates = utilization
    nvml.nvmlDeviceGetPowerUsage = lambda _: 412_500
    return nvml


class Counter:
    """Measures nothing but how often it was asked."""

    def __init__(self) -> None:
        self.reads, self.closed = 0, threading.Event()

    def read(self) -> Mapping[str, float]:
        self.reads += 1
        return {"cpu_utilization_percentage": float(self.reads)}

    def close(self) -> None:
        self.closed.set()


def test_a_node_without_gpus_has_figures_of_processors_and_memory() -> None:
    figures = Gauges({}, None).read()
    assert set(figures) == {
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        "system_memory_usage_percentage",
        "job_memory_usage_megabytes",
        "job_cpu_cores",
    }
    assert figures["system_memory_usage_megabytes"] > 0
    assert 0 < figures["system_memory_usage_percentage"] < 100


def test_gpus_that_ranks_see_have_the_figures_that_nvml_gives() -> None:
    nvml = make_nvml()
    gauges = Gauges({"CUDA_VISIBLE_DEVICES": "1,0"}, nvml)
    figures = {name: value for name, value in gauges.read().items() if name.startswith("gpu_")}
    memory = {"memory_usage_megabytes": 20_000.0, "memory_usage_percentage": 25.0, "power_usage_watts": 412.5}
    assert figures == {
        **{f"gpu_{index}_{name}": value for index in (0, 1) for name, value in memory.items()},
        "gpu_1_utilization_percentage": 93.0,
        "gpu_0_energy_joules": 0.0,
        "gpu_1_energy_joules": 0.0,
    }
    gauges.close()
    assert nvml.sessions == 0


def test_energy_is_counted_on_when_ranks_are_started_again_in_the_same_attempt(tmp_path: Path) -> None:
    nvml, notes = make_nvml(), tmp_path / "system-0.jsonl"
    notes.write_text('{"t": 1, "metrics": {"gpu_0_energy_joules": 70.5, "gpu_1_energy_joules": 3.0}}\n{"t": 2, "me')
    gauges = Gauges({"CUDA_VISIBLE_DEVICES": "0,1"}, nvml, notes)
    figures = gauges.read()
    assert (figures["gpu_0_energy_joules"], figures["gpu_1_energy_joules"]) == (70.5, 3.0)
    gauges.close()
    assert Gauges({}, nvml, tmp_path / "none").read()["gpu_0_energy_joules"] == 0


def test_nvml_that_does_not_answer_costs_the_figures_of_gpus_alone() -> None:
    nvml = make_nvml()

    def fail() -> int:
        raise NVMLError

    nvml.nvmlDeviceGetCount = fail
    gauges = Gauges({}, nvml)
    assert not [name for name in gauges.read() if name.startswith("gpu_")]
    gauges.close()
    assert nvml.sessions == 0


def test_the_energy_of_a_gpu_comes_from_its_counter_or_from_its_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, now, counted = make_nvml(), [100.0], [5_000_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    by_power = EnergyMeter(nvml, 0)
    assert by_power.read(400.0) == 0.0
    now[0] += 10
    assert by_power.read(500.0) == 4500.0
    now[0] += 10
    # What is not known is neither guessed nor lost.
    assert by_power.read(None) is None
    now[0] += 10
    assert by_power.read(500.0) == 4500.0
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _: counted[0]
    by_counter = EnergyMeter(nvml, 0)
    counted[0] += 9_000_000
    assert by_counter.read(400.0) == 9000.0
    counted[0] = 1_000_000  # the driver was loaded again
    assert by_counter.read(None) == 10_000.0


def test_a_run_has_the_memory_and_cpu_time_of_its_processes_and_not_of_the_agent(tmp_path: Path) -> None:
    own = OwnUse(os.getpid())
    code = "x = bytearray(200_000_000); print(flush=True)\nwhile True: pass"
    before = own.read()["job_memory_usage_megabytes"]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: (use := use_of(child.pid)) is not None and use.cpu_s > 0.3, "some work")
        figures = own.read()
        child.kill()
    assert figures["job_memory_usage_megabytes"] - before > 190
    assert 0 < figures["job_cpu_cores"] < 1.5
    assert own.read()["job_cpu_cores"] == 0
    assert use_of(child.pid) is None
    # Where Slurm has a cgroup for the task, what it holds counts, without pages that are merely cached.
    (tmp_path / "memory.stat").write_text("anon 3000000\nfile 900000000\nshmem 2000000\nslab_unreclaimable 500000\n")
    assert OwnUse(os.getpid(), tmp_path).read()["job_memory_usage_megabytes"] == 5.5


def test_lines_have_the_step_as_soon_as_it_was_known_once(tmp_path: Path) -> None:
    path, steps, gauges = tmp_path / "system-0.jsonl", iter([None, 7]), Counter()
    with Sampler(path, lambda: gauges, lambda: next(steps, None), every_s=0.001):
        until(lambda: gauges.reads > 3, "some measurements")
    assert gauges.closed.wait(5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("step") for line in lines[:4]] == [None, 7, 7, 7]
    assert [line["metrics"]["cpu_utilization_percentage"] for line in lines[:3]] == [1.0, 2.0, 3.0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_driver_that_hangs_does_not_keep_the_agent_and_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    gauges, hanging = Counter(), threading.Event()
    with Sampler(tmp_path / "gone" / "system-0.jsonl", lambda: gauges, lambda: None, every_s=0.001):
        until(lambda: gauges.reads > 1, "a measurement")
    assert not list(tmp_path.iterdir())

    def hang() -> Counter:
        hanging.wait(60)
        return gauges

    with Sampler(tmp_path / "system-0.jsonl", hang, lambda: None, every_s=0.001):
        pass
    hanging.set()


def read_notes(path: Path) -> list[dict[str, int]]:
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(abs(note["t"] - time.time()) < 60 for note in notes)
    return [note["sizes"] for note in notes]


def test_what_has_grown_is_noted(tmp_path: Path) -> None:
    logs = {f"rank-{rank}.log": tmp_path / f"rank-{rank}.log" for rank in range(3)}
    sizes = LogSizes(tmp_path / "sizes-0.jsonl", logs, every_s=0.0)
    for rank in range(2):
        logs[f"rank-{rank}.log"].write_text("a" * rank)
    sizes.note()
    sizes.note()
    logs["rank-0.log"].write_text("abc")
    sizes.note()
    assert read_notes(tmp_path / "sizes-0.jsonl") == [{"rank-1.log": 1}, {"rank-0.log": 3}]
    assert stat.S_IMODE((tmp_path / "sizes-0.jsonl").stat().st_mode) == 0o600


def test_nothing_is_noted_before_it_is_due_or_where_nothing_can_be_written(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("a")
    LogSizes(tmp_path / "sizes-0.jsonl", {log.name: log}).note()
    assert not (tmp_path / "sizes-0.jsonl").exists()
    LogSizes(tmp_path / "gone" / "sizes-0.jsonl", {log.name: log}, every_s=0.0).note()
    assert list(tmp_path.iterdir()) == [log]
