"""What the ranks of a node compute on."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.runtime.preflight.facts.hardware_facts import cgroup_limit, list_gpus, read_cpus


def test_a_process_may_use_at_most_the_cpus_that_were_requested() -> None:
    assert read_cpus(1)["cpus"] <= 1
    assert read_cpus(10_000)["cpus"] < 10_000
    assert read_cpus(1)["cpu"]


@pytest.mark.parametrize(
    ("outer", "inner", "limit"),
    [("max 100000", "max 100000", None), ("max 100000", "50000 100000", 0.5), ("25000 100000", "200000 100000", 0.25)],
)
def test_the_lowest_limit_of_a_cgroup_and_those_above_counts(
    tmp_path: Path, outer: str, inner: str, limit: float | None
) -> None:
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text(outer + "\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text(inner + "\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert cgroup_limit(own, tmp_path) == limit


def test_limits_of_the_first_version_of_cgroups_count_too(tmp_path: Path) -> None:
    directory = tmp_path / "cpu,cpuacct" / "job"
    directory.mkdir(parents=True)
    (directory / "cpu.cfs_quota_us").write_text("150000\n")
    (directory / "cpu.cfs_period_us").write_text("100000\n")
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/job\n3:memory:/job\n")
    assert cgroup_limit(own, tmp_path) == 1.5


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path / "missing", tmp_path) is None


def test_gpus_are_those_of_nvml_else_those_of_torch() -> None:
    by_nvml = {"name": "A100", "memory": 1, "bus": "0"}
    by_torch = {"gpu": 0, "name": "B200", "memory": 2, "ms": 0.1}
    assert list_gpus({"gpus": [by_nvml], "gemm": {"gpus": [by_torch]}}) == [{"name": "A100", "memory": 1}]
    assert list_gpus({"gpus": [], "gemm": {"gpus": [by_torch]}}) == [{"name": "B200", "memory": 2}]
    assert list_gpus({"gpus": [], "gemm": {"skip": "no CUDA"}}) == []
