"""Whether a run that is said to train has been doing nothing: its GPUs, or without GPUs its processes. Pure.

A run with GPUs is idle while each of them is: what its processors do meanwhile does not need the GPUs. A run without
GPUs is idle while its processes compute nothing and finish no step. Whoever cannot know says nothing: a node whose
newest sample is old, for instance of a suspended job, or GPUs that do not tell their use, such as parts of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.metrics.load import JOB_CORES, UTILIZATION, LoadSample
from slurmtrain.model.query.fields import iso

SAID_AFTER_S = 600.0
"""Idleness of this length is worth a word."""
# GPUs that are busy for less than this share of the time, in percent, and processes that use fewer cores do nothing.
_LEAST_GPU, _LEAST_CORES = 3.0, 0.05
# NVML's figure is of the last second or less: a few samples may all fall between two steps.
_LEAST_SAMPLES = 5
# A sample is old if further ones should have come by now.
_FRESH_S, _GAPS = 60.0, 3.0


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
    """The time of the first of the samples at the end in which a node did nothing; None if these are few."""
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
