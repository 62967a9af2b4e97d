"""Facts about nodes, and the findings that checks derive from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.checks import Finding, judge_checks

HOSTS = {node: f"node{node}" for node in range(8)}
VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": "12.8",
    "nccl": "2.28.3",
    "driver": "570.86",
    "slurmtrain": "0.1.0",
}
ROOM = {"path": "/scratch", "free": 412 * 10**9, "inodes": 1000, "writable": True}
GPU = {"name": "H100", "bus": "0000:3B:00.0", "uncorrected": 0, "pending": False, "used_mb": 600}
GPUS = {
    "asked": 2,
    "count": 2,
    "nvml": None,
    "mig": False,
    "gpus": [GPU, {**GPU, "bus": "0000:4C:00.0"}],
    "xids": [],
    "kernel_log": None,
    "gemm": {
        "count": 2,
        "gpus": [
            {"gpu": 0, "name": "H100", "ms": 0.2, "tflops": 612.0},
            {"gpu": 1, "name": "H100", "ms": 0.21, "tflops": 640.0},
        ],
    },
}
GOOD: dict[str, Any] = {
    "shared": {"read_ms": 12.0},
    "versions": VERSIONS,
    "gpu": GPUS,
    "hardware": {"gpus": [{"name": "H100", "memory": 80 << 30}] * 2},
    "disk": ROOM,
    "tmp": ROOM,
    "shm": ROOM,
    "limits": {"nofile": 65536, "memlock": None, "rdma": []},
    "dns": {"10.0.0.5": 3.0},
    "straggler": {"seconds": 0.0004},
    "environment": {"said": []},
}


def spec_with(**sections: Any) -> Spec:
    """A spec whose preflight sections have these values."""
    base = PreflightSpec()
    changed = {
        name: replace(getattr(base, name), **values) if isinstance(values, dict) and name != "plugins" else values
        for name, values in sections.items()
    }
    return Spec(preflight=replace(base, **changed))


def judge_check(check: str, facts: Mapping[int, Mapping[str, Any]], spec: Spec | None = None) -> dict[int, Finding]:
    """The finding of one check on each node, with everything else healthy."""
    findings = judge_checks({node: {**GOOD, check: its} for node, its in facts.items()}, spec or Spec(), HOSTS)
    return {node: next(finding for finding in its if finding.check == check) for node, its in findings.items()}


def judge_node(check: str, facts: Mapping[str, Any], spec: Spec | None = None) -> Finding:
    """The finding of one check on a single node."""
    return judge_check(check, {0: facts}, spec)[0]


def limits(nofile: int | None = 65536, memlock: int | None = 8 * 2**20, rdma: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"nofile": nofile, "memlock": memlock, "rdma": list(rdma)}
