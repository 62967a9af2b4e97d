"""What torch's profiler records of a few steps: how much of them is communication, and traces of them.

On GPUs communication is NCCL's kernels, and with gloo, on CPUs as well, its operations from the moment they begin. What
counts is the time when nothing else ran (:mod:`slurmtrain.model.metrics.step_figures`). That is the same with DDP,
shards and ZeRO, whose collectives begin in different places, and needs no hook in any of them. The recorded steps are
the same ones on all ranks.

Traces, for Chrome and Perfetto, are of rank 0 and of the slowest rank, once in a run. What is traced is not changed:
steps compute the same bits. Before the first of these steps, the ranks tell each other how much time of its own each of
them has in a step, which shows the slowest, and whether the run has a trace already. A rank that stops within these
steps leaves none, and the attempt that trains them again traces them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slurmtrain.errors import PathError
from slurmtrain.model.metrics.step_figures import Interval, RecordedActivity, communication_share
from slurmtrain.model.run.events.rank_events import StepsTraced
from slurmtrain.runtime.job.torch_private import RecordedEvent, is_profiled, recorded_events
from slurmtrain.system.files import FILE_MODE, describe_os_error, make_directory

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import AttemptDir
    from slurmtrain.runtime.job.process_group import RankGroup

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
_TRACE_NAME = re.compile(r"rank-[0-9]{1,9}\.steps-([0-9]{1,18})-([0-9]{1,18})\.json\.gz")
_UNKNOWN = "the slowest rank is unknown, since no rank's own time was measured before: only rank 0 is traced"


def _start_profile(device: torch.device) -> Any:
    """A profiler that has begun, after all earlier work of the GPU. Raises RuntimeError."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    _wait_for_gpu(device)
    started = profile(activities=activities)
    started.start()
    return started


def _wait_for_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- communication ----------------------------------------------------------------------------------------------------


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
            _wait_for_gpu(self._device)
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
        self._began = time.perf_counter()
        try:
            started = _start_profile(self._device)
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


# --- traces -----------------------------------------------------------------------------------------------------------


class StepTracer:
    """Traces steps of this rank, if it is one of those that are to be traced; all ranks make the same calls."""

    def __init__(self, steps: tuple[int, int], attempt: AttemptDir, ranks: RankGroup) -> None:
        """Trace from the first to the last of ``steps``, as numbers of finished ones.

        ``attempt``: where the trace goes. ``ranks``: the ranks of the run.
        """
        self._first, self._last = steps
        self._attempt = attempt
        self._ranks = ranks
        self._why = ""
        self._is_chosen: bool | None = None
        self._profile: Any = None
        self._mark: Any = None
        self._begun_at = 0

    def is_due(self, step: int) -> bool:
        """Whether the step after so many finished ones is to be traced."""
        return self._first <= step < self._last and self._is_chosen is not False

    def is_over(self, step: int) -> bool:
        """Whether nothing is to be traced any more after so many finished steps."""
        return step >= self._last or self._is_chosen is False

    def begin(self, step: int, own_s: float) -> None:
        """A step that :meth:`is_due` begins. ``step``: how many have finished. ``own_s``: this rank's own time in one.

        Only the first call communicates.
        """
        if self._is_chosen is None:
            has_trace = any(map(self._is_of_these, self._attempt.run.attempts.glob("*/profiles/*.json.gz")))
            answers = self._ranks.gather((has_trace, own_s))
            traced, self._why = choose_ranks([own for _, own in answers])
            self._is_chosen = self._ranks.rank in traced and not any(has for has, _ in answers)
        if self._is_chosen and self._profile is None:
            self._start(step)
        if self._profile is not None:
            self._mark = record_function(f"step {step}")
            self._mark.__enter__()

    def end_step(self) -> bool:
        """The step has ended; returns whether it was traced, which takes time."""
        if self._mark is None:
            return False
        self._mark.__exit__(None, None, None)
        self._mark = None
        return True

    def write(self, step: int) -> StepsTraced | None:
        """Write the trace, which ends after so many finished steps; returns what to journal, if anything."""
        if not self._is_chosen:
            return None
        ended, self._profile, self._is_chosen = self._profile, None, False
        facts = StepsTraced(
            rank=self._ranks.rank, first=self._first if ended is None else self._begun_at, last=step, why=self._why
        )
        if ended is None:
            return replace(facts, problem="another profiler was active in these steps")
        path = self._attempt.profiles / f"rank-{facts.rank}.steps-{facts.first}-{facts.last}.json.gz"
        try:
            _wait_for_gpu(self._ranks.device)
            ended.stop()
            size = _export(ended, path)
        except (OSError, PathError, RuntimeError) as error:
            return replace(facts, problem=describe_os_error(error) if isinstance(error, OSError) else str(error))
        return replace(facts, path=str(path.relative_to(self._attempt.run.path)), bytes=size)

    def close(self) -> None:
        """Steps are interrupted: there will be no trace of these."""
        self.end_step()
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()

    def _is_of_these(self, path: Path) -> bool:
        """Whether a file is a trace of these steps, or of the part that an attempt has trained."""
        match = _TRACE_NAME.fullmatch(path.name)
        return match is not None and self._first <= int(match[1]) and int(match[2]) <= self._last

    def _start(self, step: int) -> None:
        # There can be only one profiler, and a second one would end it: perhaps with the next step.
        if not is_profiled():
            self._profile, self._begun_at = _start_profile(self._ranks.device), step


def _export(profiled: Any, path: Path) -> int:
    """Write a trace, which only its owner can read: it has names of files and functions. Returns its size in bytes."""
    make_directory(path.parent, private=True)
    partial = path.with_name(f".{path.name}")
    try:
        profiled.export_chrome_trace(str(partial))
        partial.chmod(FILE_MODE)
        size = partial.stat().st_size
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def choose_ranks(own_s: Sequence[float]) -> tuple[set[int], str]:
    """The ranks that are traced, and why, as a phrase.

    Args:
        own_s: The time of its own that each rank has in a step, in seconds; 0: unknown.
    """
    if len(own_s) == 1:
        return {0}, "the only rank"
    slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
    if not own_s[slowest]:
        return {0}, _UNKNOWN
    return {0, slowest}, f"rank {slowest} is the slowest: {1000 * own_s[slowest]:.3g} ms of its own in a step"
