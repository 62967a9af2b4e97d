"""How much of a step is communication: torch's profiler records a few steps, which are the same ones on all ranks.

On GPUs communication is NCCL's kernels, and with gloo, on CPUs as well, its operations from the moment they begin. What
counts is the time when nothing else ran (:mod:`slurmtrain.model.metrics.step_figures`). That is the same with DDP,
shards and ZeRO, whose collectives begin in different places, and needs no hook in any of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slurmtrain.model.metrics.step_figures import Interval, RecordedActivity, communication_share
from slurmtrain.runtime.job.torch_private import RecordedEvent, is_profiled, recorded_events

_log = logging.getLogger("slurmtrain")
# The first steps are not like others: DDP rebuilds its buckets, and memory is allocated.
_FIRST = 5
# So many steps are recorded at a time, and again when there have been so many times as many.
_STEPS = 3
_TIMES = 4
_NEVER = 1 << 62
_MARK = "slurmtrain step"
_GLOO, _NCCL = "gloo:", "nccl"
# What computes on a CPU, and contains no wait, as other ranges may.
_OPERATORS = ("aten::", "Torch-Compiled Region", "CompiledFunction")
_COPIES = ("Memcpy", "Memset")


class CommunicationSampler:
    """Measures what part of steps this rank communicates in. All ranks make the same calls."""

    def __init__(self, device: torch.device, *, alone: bool = False) -> None:
        """``device``: where the rank computes. ``alone``: whether there are no others, and so nothing to measure."""
        self.share: float | None = 0.0 if alone else None
        """The mean over all recorded steps so far, from 0 to 1; None: nothing is known yet."""
        self.steps = 0
        """How many steps were recorded."""
        self.seconds = 0.0
        """How long these took together, with all that recording them takes."""
        self._device = device
        self._shares: list[float] = []
        self._count = 0
        self._next = _NEVER if alone else _FIRST
        self._left = 0
        self._began = 0.0
        self._profile: Any = None
        self._mark: Any = None

    def begin_step(self) -> None:
        """A step begins."""
        self._count += 1
        if self._count > self._next and self._profile is None:
            self._next *= _TIMES
            self._start()
        if self._profile is not None:
            self._mark = record_function(_MARK)
            self._mark.__enter__()

    def end_step(self) -> bool:
        """The step has ended; returns whether it was recorded, which takes time."""
        if self._profile is None:
            return False
        self._left -= 1
        if not self._left:
            # The last one is as long as the GPU, which runs behind, takes for all of them.
            self._wait()
        self._mark.__exit__(None, None, None)
        self._mark = None
        if not self._left:
            self._stop()
        return True

    def close(self) -> None:
        """There are no more steps: what was recorded of incomplete ones does not count."""
        if self._profile is not None:
            if self._mark is not None:
                self._mark.__exit__(None, None, None)
            self._stop(counts=False)

    def _start(self) -> None:
        # The script's own profiler, or one of the spec's, comes first: there can be only one.
        if is_profiled():
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._began = time.perf_counter()
        self._wait()
        started = profile(activities=activities)
        try:
            started.start()
        except RuntimeError as error:
            # As from CUPTI, which another tool may use.
            _log.warning("the part of steps that is communication is not measured: %s", error)
            self._next = _NEVER
            return
        self._profile, self._left = started, _STEPS

    def _stop(self, *, counts: bool = True) -> None:
        ended, self._profile = self._profile, None
        ended.stop()
        share = communication_share(activity_of(recorded_events(ended))) if counts else None
        if share is not None:
            self._shares.append(share)
            self.share = sum(self._shares) / len(self._shares)
        self.steps += _STEPS - self._left
        self.seconds += time.perf_counter() - self._began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def activity_of(events: Iterable[RecordedEvent]) -> RecordedActivity:
    """What a rank and its GPU did, by the ``events`` that torch's profiler has recorded."""
    gpu_collectives: list[Interval] = []
    cpu_collectives: list[Interval] = []
    kernels: list[Interval] = []
    operators: list[Interval] = []
    steps: list[Interval] = []
    for event in events:
        took = event.begin_ns, event.begin_ns + event.duration_ns
        if event.on_gpu:
            # The GPU's copies of ranges on the CPU are none of its work, and copies hide no communication.
            if event.is_range or event.name.startswith(_COPIES):
                continue
            (gpu_collectives if event.name.startswith(_NCCL) else kernels).append(took)
        elif event.name == _MARK:
            steps.append(took)
        elif event.name.startswith(_GLOO):
            cpu_collectives.append(took)
        elif event.name.startswith(_OPERATORS):
            operators.append(took)
    return RecordedActivity(gpu_collectives, cpu_collectives, kernels or operators, steps)
