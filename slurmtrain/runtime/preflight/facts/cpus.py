"""The CPUs that the ranks of this node run on, where the spec binds them: from what the kernel and NVML say."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.model.experiment.resources import GPU, Cpu, bind_ranks, read_cpus, write_cpus
from slurmtrain.runtime.environment import variables

if TYPE_CHECKING:
    from slurmtrain.model.experiment.resources import ResourcesSpec
    from slurmtrain.runtime.environment.node import Node

_SYSTEM = Path("/sys/devices/system")
_WORD_BITS = 64


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
    near = _near_gpus(ranks) if resources.bind == GPU else []
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
        topology = system / f"cpu/cpu{cpu}/topology"
        package, core = _number(topology / "physical_package_id", 0), _number(topology / "core_id", cpu)
        places[cpu] = Cpu(node=nodes.get(cpu, 0), package=package, core=core)
    return places


def _number(path: Path, default: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max(0, int(path.read_text(encoding="utf-8")))
    return default


def _near_gpus(ranks: int) -> list[set[int]]:
    """The CPUs near the GPU of each rank; empty where NVML does not say."""
    from slurmtrain.runtime.preflight.facts import gpus

    nvml = gpus.load_nvml()
    if nvml is None:
        return [set()] * ranks
    near: list[set[int]] = []
    words = (max(os.cpu_count() or 1, 1) + _WORD_BITS - 1) // _WORD_BITS
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            for handle in gpus.open_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")):
                masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
                # Words of 64 bits, the first CPUs' word first.
                bits = sum(mask << _WORD_BITS * word for word, mask in enumerate(masks))
                near.append({cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1})
        finally:
            nvml.nvmlShutdown()
    # As the library does: GPUs are dealt out to ranks in turn.
    return [near[rank % len(near)] for rank in range(ranks)] if near else [set()] * ranks
