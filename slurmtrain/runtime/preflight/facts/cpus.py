"""The CPUs of this node: their model, number and speed, and the ones that ranks run on where the spec binds them.

The kernel says where they are, and NVML which are near a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.resources import GPU, Cpu, bind_ranks, read_cpus, write_cpus
from slurmtrain.runtime.environment import variables
from slurmtrain.runtime.preflight.facts.gpus import cpus_near_gpus
from slurmtrain.system.owned_files import read_readable

if TYPE_CHECKING:
    from slurmtrain.model.experiment.resources import ResourcesSpec
    from slurmtrain.runtime.environment.node import Node

_SYSTEM = Path("/sys/devices/system")
# Rounds of the computation whose fastest is the speed of a core, and the bytes of one.
_ROUNDS = 30
_BLOCK = bytes(1 << 20)
_ROOT = Path("/")


def set_binding(resources: ResourcesSpec, node: Node) -> None:
    """Set the CPUs that the ranks of this ``node`` inherit, so that each runs on CPUs of its own.

    ``resources``: the node's.
    """
    os.environ.pop(variables.CPUS, None)
    if resources.bind is None:
        return
    allowed = os.sched_getaffinity(0)
    if node.executor == "local" and node.count > 1:
        # The nodes of a local run share this machine.
        allowed = set(bind_ranks("cores", read_topology(allowed), node.count)[node.index])
    ranks = resources.local_world_size
    near = cpus_near_gpus(ranks, os.environ.get("CUDA_VISIBLE_DEVICES")) if resources.bind == GPU else []
    parts = bind_ranks(resources.bind, read_topology(allowed), ranks, near)
    os.environ[variables.CPUS] = ";".join(map(write_cpus, parts))


def bound_cpus(ranks: Collection[int]) -> Mapping[str, str]:
    """The CPUs of these ``ranks``, this node's in their order, as the event ``workers`` has them."""
    parts = os.environ.get(variables.CPUS, "")
    return dict(zip(map(str, ranks), parts.split(";"), strict=True)) if parts else {}


def read_topology(cpus: Collection[int], system: Path = _SYSTEM) -> dict[int, Cpu]:
    """Where each of these CPUs is; what the kernel does not say is 0. ``system``: /sys/devices/system."""
    nodes: dict[int, int] = {}
    for path in system.glob("node/node*/cpulist"):
        with contextlib.suppress(OSError, ValueError):
            number = int(re.sub(r"\D", "", path.parent.name))
            nodes |= dict.fromkeys(read_cpus(path.read_text(encoding="utf-8")), number)
    places = {}
    for cpu in cpus:
        numbers = {"physical_package_id": 0, "core_id": cpu}
        for name in numbers:
            with contextlib.suppress(OSError, ValueError):
                numbers[name] = max(0, int((system / f"cpu/cpu{cpu}/topology/{name}").read_text(encoding="utf-8")))
        places[cpu] = Cpu(node=nodes.get(cpu, 0), package=numbers["physical_package_id"], core=numbers["core_id"])
    return places


def read_field(path: str, name: str, separator: str = ":") -> str:
    """The first value of a ``name`` in a file of names and values at ``path``; empty if there is none.

    ``separator``: what stands between a name and its value.
    """
    try:
        lines = read_readable(path).decode(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(separator) for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def describe_cpus(requested: int) -> dict[str, Any]:
    """``cpu``, the model, and ``cpus``: how many ``requested`` CPUs this process may use.

    Its affinity and its cgroups limit them; a limit of the time on CPUs may leave a fraction.
    """
    usable = float(min(requested, len(os.sched_getaffinity(0))))
    model = read_field("/proc/cpuinfo", "model name") or platform.machine()
    return {"cpu": model, "cpus": min(usable, cgroup_limit() or usable)}


def compute_on_one_core() -> float:
    """Seconds of a computation on one core without use of memory: a hash, the fastest of some rounds."""

    def seconds() -> float:
        began = time.perf_counter()
        # No CPU has instructions of its own for this one, so that CPUs differ only by their speed.
        hashlib.blake2b(_BLOCK)
        return time.perf_counter() - began

    return min(seconds() for _ in range(_ROUNDS))


def cgroup_limit(root: Path = _ROOT) -> float | None:
    """How many CPUs' time cgroups leave to this process; None if there is no limit, or none that can be read.

    ``root`` replaces ``/`` in tests.
    """
    limits: list[float] = []
    for each in own_cgroups("cpu", root):
        # One that is unlimited ("max", or -1) is no number of microseconds.
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (each / "cpu.max").exists():
                quota, period = (each / "cpu.max").read_text().split()
            else:
                quota, period = ((each / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def own_cgroups(controller: str, root: Path = _ROOT) -> list[Path]:
    """The cgroups of this process for a ``controller``, each before those around it, version 1 before version 2.

    Of version 2, some may lack the controller; in a container, all but the outermost may be missing. ``root`` replaces
    ``/`` in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in sorted(lines, key=lambda line: line.startswith("0::")):
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            inner = mount / path.lstrip("/")
            folders += [each for each in (inner, *inner.parents) if each.is_relative_to(mount)]
    return folders
