"""How busy nodes were at what times, and whether a run that is said to train has been doing nothing. Pure.

Agents note lines of figures (``runtime.agent.monitor``). A run with GPUs is idle while each of them is: what its
processors do meanwhile does not need the GPUs. A run without GPUs is idle while its processes compute nothing and
finish no step. Whoever cannot know says nothing: a node whose newest sample is old, for instance of a suspended job, or
GPUs that do not tell their use, such as parts of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slurmtrain.model.query.fields import iso
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
SAID_AFTER_S = 600.0
"""Idleness of this length is worth a word."""
# GPUs that are busy for less than this share of the time, in percent, and processes that use fewer cores do nothing.
_LEAST_GPU, _LEAST_CORES = 3.0, 0.05
# NVML's figure is of the last second or less: a few samples may all fall between two steps.
_LEAST_SAMPLES = 5
# A sample is old if further ones should have come by now.
_FRESH_S, _GAPS = 60.0, 3.0


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
            if (place := _gpu_figure(name)) is not None and place[1] == figure
        }


# A long run on many nodes has millions of figures, and a few dozen names.
@lru_cache(maxsize=4096)
def _gpu_figure(name: str) -> tuple[int, str] | None:
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


# --- idleness ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """Since when a run has been idle, in seconds since 1970, and how many GPUs that are on how many nodes.

    ``gpus``: 0 for a run without GPUs.
    """

    since: float
    gpus: int
    nodes: int

    @property
    def subject(self) -> str:
        """What is idle: ``its 8 GPUs``."""
        if not self.gpus:
            return "its processes"
        return "its GPU" if self.gpus == 1 else f"its {self.gpus} GPUs"

    def describe(self) -> str:
        """This as a sentence, without a full stop; the time is in ISO 8601."""
        verb = ("has" if self.gpus == 1 else "have") + (" been idle" if self.gpus else " computed nothing")
        return f"{self.subject} {verb} since {iso(self.since)}"

    def to_dict(self) -> dict[str, Any]:
        """As ``idle`` of the JSON contract."""
        return {"since": iso(self.since), "gpus": self.gpus, "nodes": self.nodes}


def find_idle(nodes: Mapping[str, Sequence[LoadSample]], now: float, *, wants_gpus: bool) -> Idle | None:
    """Since when a run has been idle; None if it is not, or if that is unknown.

    Args:
        nodes: The samples of each node, in order; the newest ones are enough to say that a run is not idle.
        now: The current time, in seconds since 1970.
        wants_gpus: Whether the run has asked for GPUs.
    """
    # A node that the run has lost adds nothing, and of a heterogeneous job some nodes have no GPUs.
    fresh = [samples for samples in nodes.values() if _is_fresh(samples, now)]
    counted = [samples for samples in fresh if not wants_gpus or samples[-1].of_gpus(UTILIZATION)]
    since = [_quiet_since(samples, wants_gpus=wants_gpus) for samples in counted]
    quiet = [each for each in since if each is not None]
    if not quiet or len(quiet) < len(since):
        return None
    gpus = sum(len(samples[-1].of_gpus(UTILIZATION)) for samples in counted) if wants_gpus else 0
    return Idle(max(quiet), gpus, len(counted))


def _is_fresh(samples: Sequence[LoadSample], now: float) -> bool:
    """Whether no further sample should have come by now."""
    if len(samples) < _LEAST_SAMPLES:
        return False
    last, newest = samples[-2:]
    return now - newest.time <= _FRESH_S + _GAPS * (newest.time - last.time)


def _quiet_since(samples: Sequence[LoadSample], *, wants_gpus: bool) -> float | None:
    """The time of the first of the last samples that say that a node did nothing; None if these are few."""
    quiet: list[LoadSample] = []
    for index in range(len(samples) - 1, -1, -1):
        if not _is_quiet(samples[index], samples[index - 1] if index else None, wants_gpus=wants_gpus):
            break
        quiet.append(samples[index])
    return quiet[-1].time if len(quiet) >= _LEAST_SAMPLES else None


def _is_quiet(sample: LoadSample, before: LoadSample | None, *, wants_gpus: bool) -> bool:
    """Whether a node did nothing, as far as a sample and the one ``before`` it tell."""
    use = sample.of_gpus(UTILIZATION)
    if any(percent >= _LEAST_GPU for percent in use.values()):
        return False
    if wants_gpus:
        return bool(use)
    return sample.figures.get(JOB_CORES, _LEAST_CORES) < _LEAST_CORES and (before is None or before.step == sample.step)
