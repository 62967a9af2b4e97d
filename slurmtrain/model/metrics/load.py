"""How busy nodes were at what times, from the lines that their agents note (``runtime.agent.monitor``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slurmtrain.model.run.events.base import is_whole

UTILIZATION, GPU_MEMORY, POWER, ENERGY = (
    "utilization_percentage",
    "memory_usage_megabytes",
    "power_usage_watts",
    "energy_joules",
)
"""Figures of each GPU."""
JOB_MEMORY, JOB_CORES = "job_memory_usage_megabytes", "job_cpu_cores"
"""Figures of the run's own processes on the node."""
_GPU = re.compile(r"gpu_(\d+)_(\w+)")


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A line: the time in seconds since 1970, the last finished step if that was known, and the figures by name."""

    time: float
    step: int | None
    figures: Mapping[str, float]

    def of_gpus(self, figure: str) -> dict[int, float]:
        """A figure of each GPU, such as :data:`UTILIZATION`, by the GPU's number; GPUs without it are left out."""
        return {
            place[0]: value
            for name, value in self.figures.items()
            if (place := _place_of(name)) is not None and place[1] == figure
        }


# A long run on many nodes has millions of figures, and a few dozen names.
@lru_cache(maxsize=4096)
def _place_of(name: str) -> tuple[int, str] | None:
    match = _GPU.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def read_sample(record: Mapping[str, Any]) -> LoadSample | None:
    """What a line's ``record``, which has a time, says; None if it has no figures."""
    metrics, step = record.get("metrics"), record.get("step")
    if not isinstance(metrics, dict):
        return None
    figures = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    }
    return LoadSample(float(record["t"]), step if is_whole(step) else None, figures)


def joules(samples: Iterable[LoadSample]) -> float | None:
    """The energy that the GPUs of one node took, in joules; None if no sample says so.

    A smaller figure than the one before begins a new count.

    Args:
        samples: All of the node's, in order.
    """
    total = 0.0
    last: dict[int, float] = {}
    for sample in samples:
        for gpu, counted in sample.of_gpus(ENERGY).items():
            before = last.get(gpu, 0.0)
            total += counted - before if counted >= before else counted
            last[gpu] = counted
    return total if last else None


def most(samples: Sequence[LoadSample], name: str) -> float | None:
    """The largest value of a figure of a node, such as :data:`JOB_MEMORY`; None if no sample has it."""
    return max((sample.figures[name] for sample in samples if name in sample.figures), default=None)
