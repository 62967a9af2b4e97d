"""Where the CPUs of this machine are, as the kernel says."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.model.experiment.resources import Cpu
from slurmtrain.runtime.preflight.facts.cpus import read_topology


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
