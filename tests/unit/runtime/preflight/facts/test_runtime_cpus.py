"""Where the CPUs of this machine are, as the kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.model.experiment.resources import Cpu
from slurmtrain.runtime.preflight.facts.cpus import cgroup_limit, describe_cpus, read_topology


def test_nodes_packages_and_cores_are_read_and_what_is_missing_is_0(tmp_path: Path) -> None:
    files = {
        "node/node0/cpulist": "0-1\n",
        "node/node10/cpulist": "2,4-5\n",
        "cpu/cpu0/topology/physical_package_id": "0\n",
        "cpu/cpu0/topology/core_id": "3\n",
        "cpu/cpu4/topology/physical_package_id": "1\n",
        "cpu/cpu4/topology/core_id": "3\n",
        "cpu/cpu5/topology/physical_package_id": "-1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_topology([0, 4, 5, 9], tmp_path) == {
        0: Cpu(node=0, package=0, core=3),
        4: Cpu(node=10, package=1, core=3),
        5: Cpu(node=10, package=0, core=5),
        9: Cpu(node=0, package=0, core=9),
    }


# --- what the ranks of a node compute on --------------------------------------------------------------------------


def test_a_process_may_use_at_most_the_cpus_that_were_requested() -> None:
    assert describe_cpus(1)["cpus"] <= 1
    assert describe_cpus(10_000)["cpus"] < 10_000
    assert describe_cpus(1)["cpu"]


def write_own(root: Path, text: str) -> None:
    """Say which cgroups this process is in."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


@pytest.mark.parametrize(
    ("outer", "inner", "limit"),
    [("max 100000", "max 100000", None), ("max 100000", "50000 100000", 0.5), ("25000 100000", "200000 100000", 0.25)],
)
def test_the_lowest_limit_of_a_cgroup_and_those_above_counts(
    tmp_path: Path, outer: str, inner: str, limit: float | None
) -> None:
    job = tmp_path / "sys/fs/cgroup/job"
    (job / "step").mkdir(parents=True)
    (job / "cpu.max").write_text(outer + "\n")
    (job / "step" / "cpu.max").write_text(inner + "\n")
    write_own(tmp_path, "0::/job/step\n")
    assert cgroup_limit(tmp_path) == limit


def test_limits_of_the_first_version_of_cgroups_count_too(tmp_path: Path) -> None:
    directory = tmp_path / "sys/fs/cgroup/cpu,cpuacct/job"
    directory.mkdir(parents=True)
    (directory / "cpu.cfs_quota_us").write_text("150000\n")
    (directory / "cpu.cfs_period_us").write_text("100000\n")
    write_own(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n")
    assert cgroup_limit(tmp_path) == 1.5
