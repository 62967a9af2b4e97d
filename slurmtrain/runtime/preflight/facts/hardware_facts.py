"""What the ranks of a node compute on: its GPUs, or the model, the number and the speed of its CPUs."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.runtime.preflight.facts.environment_facts import read_field

_ROUNDS = 30
_BLOCK = bytes(1 << 20)
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def list_gpus(inspected: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ``name`` and the ``memory`` in bytes of each GPU in what ``inspect_gpus`` returned (``inspected``)."""
    gpus = inspected.get("gpus") or inspected.get("gemm", {}).get("gpus", ())
    return [{"name": gpu.get("name"), "memory": gpu.get("memory")} for gpu in gpus]


def read_cpus(requested: int) -> dict[str, Any]:
    """``cpu``, the model, and ``cpus``: how many ``requested`` CPUs this process may use.

    Its affinity and its cgroups limit them; a limit of the time on CPUs may leave a fraction.
    """
    usable = float(min(requested, len(os.sched_getaffinity(0))))
    model = read_field("/proc/cpuinfo", "model name") or platform.machine()
    return {"cpu": model, "cpus": min(usable, cgroup_limit(_OWN_CGROUPS, _CGROUPS) or usable)}


def compute_on_one_core() -> float:
    """Seconds of a computation on one core without use of memory: a hash, the fastest of some rounds."""

    def seconds() -> float:
        began = time.perf_counter()
        # No CPU has instructions of its own for this one, so that CPUs differ only by their speed.
        hashlib.blake2b(_BLOCK)
        return time.perf_counter() - began

    return min(seconds() for _ in range(_ROUNDS))


def cgroup_limit(own: Path, root: Path) -> float | None:
    """How many CPUs' time cgroups leave to a process; None if there is no limit, or none that can be read.

    Args:
        own: The process's list of its cgroups, as in /proc/self/cgroup.
        root: Where cgroups are mounted.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    limits = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        directory = mount / path.lstrip("/")
        # A limit holds for all cgroups below. In a container the path may be one of the machine's.
        for each in (directory, *directory.parents):
            if each.is_relative_to(mount) and (limit := _limit_of(each)) is not None:
                limits.append(limit)
    return min(limits, default=None)


def _limit_of(directory: Path) -> float | None:
    """The limit of one cgroup, of version 2 or 1."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
