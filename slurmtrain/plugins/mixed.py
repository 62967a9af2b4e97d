"""Runs on mixed hardware: shares of a batch that suit the speeds of ranks, measured in the steps of the training.

The first steps have equal shares, then such that are in proportion to the speeds of these. With two numbers of samples
the fixed part of the time is known, too. Each step is measured until other shares would gain no more than noise
explains. After that only some steps are, and the shares stay until a rank needs another time than expected. A rank says
so in the ranks' vote; only if one has, all exchange their speeds, and each computes the same shares.

:mod:`.paces` says which shares suit which times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from slurmtrain.errors import StrategyError
from slurmtrain.model.run.events.rank_events import SharesChosen
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Attempt
from slurmtrain.plugins.paces import (
    LEAST_TIMES,
    MOST_TIMES,
    Pace,
    ShareAdvice,
    Speed,
    balance,
    fit_speed,
    judge,
    pace_of,
    since_change,
    slowest_s,
)
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.job.run_reader import read_run
from slurmtrain.runtime.training.parallel import Shares

# At first so many are not measured: they warm up, or load their data anew.
_WARM_UP = 2
# Where ranks are not sure, they measure so many times as many steps in addition before they choose again.
_LONGER = 0.5


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a rank tells the others: ``count`` steps with its samples of the ``batch`` have its ``pace``."""

    speed: Speed | None
    pace: Pace | None
    batch: tuple[int, int] | None
    count: int
    most: int | None
    has_microbatches: bool


class Balancer:
    """Measures this rank, and chooses the shares together with the others."""

    def __init__(self, shares: Shares, ranks: RankGroup, run: RunDir | None = None) -> None:
        """``shares``: which it changes. ``ranks``: of the session. ``run``: where choices are journaled."""
        self._shares = shares
        self._ranks = ranks
        self._clock = ComputeTime(ranks.device)
        self._memory = SampleMemory(ranks.device)
        # Of the latest steps with the current share.
        self._times: list[float] = []
        # By numbers of samples, the latest last.
        self._paces: dict[int, Pace] = {}
        self._speed: Speed | None = None
        # The pace for which the shares have been chosen; None: they have yet to be.
        self._expected: Pace | None = None
        # How many more steps are measured before this rank calls for a choice.
        self._remaining = 0
        self._skipped = _WARM_UP
        self._batch: tuple[int, int] | None = None
        self._has_told = False
        self._run = run
        self._recorded = RecordedShares()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure until the gradients of these ``parameters`` are there."""
        self._clock.watch(parameters)

    def repeat(self, step: int) -> None:
        """Divide the batches after ``step`` finished steps as before, if they are repeated. Call it on all ranks."""
        recorded = RecordedShares()
        if self._run is not None and self._ranks.rank == 0:
            recorded = recorded_shares(read_run(self._run).attempts, step, self._ranks.world_size)
        self._recorded = self._ranks.broadcast(recorded)

    def begin(self, step: int, *, due: bool) -> None:
        """Begin a step, after ``step`` finished ones; ``due``: ranks agree after it.

        As long as shares are being chosen, each step is measured; none is that is repeated.
        """
        if step >= self._recorded.until and (self._expected is None or due):
            self._shares.samples_taken = self._shares.at_once = None
            self._memory.begin()
            self._clock.begin()

    def end(self, step: int) -> SharesChosen | None:
        """End a step, of now ``step`` finished ones. Returns what to journal, if it is followed by other shares again.

        Raises StrategyError if the script has not taken its share.
        """
        self._measure()
        chosen = self._recorded.choices.get(step)
        if chosen is not None:
            self._shares.change(chosen.shares, [limit or None for limit in chosen.limits])
        return chosen

    def _measure(self) -> None:
        seconds, batch = self._clock.end(), self._shares.samples_taken
        if seconds is None:
            return
        if batch is None:
            raise StrategyError(
                "the spec has 'resources.mixed: true', but the script gives all processes the same number of samples: "
                "take the samples of "
                "this one by run.share(batch), or load them with run.loader(...)"
            )
        # A rank without samples computes with one.
        batch = max(1, batch[0]), batch[1]
        if self._batch is None or (batch != self._batch and batch[1] >= self._batch[1]):
            self._batch = batch
            self._times = []
        if self._skipped:
            self._skipped -= 1
        elif batch == self._batch:
            self._times = since_change([*self._times, seconds][-MOST_TIMES:])
            self._remaining -= 1
            self._memory.end(self._shares.at_once or batch[0])

    @property
    def calls(self) -> bool:
        """Whether this rank calls for shares to be chosen now."""
        if self._batch is None or len(self._times) < LEAST_TIMES:
            return False
        if self._expected is None:
            return self._remaining <= 0
        return pace_of(self._times).differs_from(self._expected)

    def choose(self, step: int) -> SharesChosen | None:
        """Choose shares after ``step`` finished steps; call it on all ranks. Returns what to journal, if anything."""
        return self._decide(step, self._ranks.gather(self._measured()))

    def close(self) -> None:
        """Stop measuring."""
        self._clock.close()

    def _decide(self, step: int, gathered: Sequence[_Measured]) -> SharesChosen | None:
        speeds = [each.speed for each in gathered if each.speed is not None]
        paces = [each.pace for each in gathered if each.pace is not None]
        batches = [each.batch for each in gathered if each.batch is not None]
        # The script may have given ranks different batches.
        if min(len(speeds), len(paces), len(batches)) < len(gathered) or len({size for _, size in batches}) != 1:
            return None
        current, size = tuple(samples for samples, _ in batches), batches[0][1]
        better = balance(speeds, size, most=[None if each.has_microbatches else each.most for each in gathered])
        errors = [each.error for each in paces]
        advice = ShareAdvice.KEEP if better is None else judge(speeds, errors, better, current)
        count = min(each.count for each in gathered)
        if better is not None and advice is ShareAdvice.CHANGE:
            self._shares.change(better, [each.most for each in gathered])
            self._times, self._batch, self._expected = [], None, None
            # With other shares a loader starts its workers anew, so that the first step takes longer.
            self._remaining, self._skipped = 0, 1
        elif advice is ShareAdvice.WAIT:
            self._expected, self._remaining = None, math.ceil(_LONGER * count)
            return None
        else:
            self._expected = paces[self._ranks.rank]
            if self._has_told:
                return None
        self._has_told = advice is not ShareAdvice.CHANGE
        shares = better if better is not None and advice is ShareAdvice.CHANGE else current
        return SharesChosen(
            step=step,
            shares=shares,
            limits=self._shares.limits,
            fixed_s=[round(speed.fixed_s, 6) for speed in speeds],
            sample_s=[round(speed.sample_s, 9) for speed in speeds],
            step_s=round(slowest_s(speeds, shares), 6),
            before_s=round(slowest_s(speeds, current), 6),
        )

    def _measured(self) -> _Measured:
        """What this rank tells the others, with its speed by its pace."""
        pace = self._expected
        if len(self._times) >= LEAST_TIMES and self._batch is not None:
            pace, samples = pace_of(self._times), self._batch[0]
            if self._speed is not None and list(self._paces)[-1] == samples:
                # All of the rank became slower or faster.
                factor = pace.seconds / self._paces[samples].seconds
                self._paces = {each: Pace(factor * old.seconds, old.error) for each, old in self._paces.items()}
            self._paces.pop(samples, None)
            self._paces[samples] = pace
            self._speed = fit_speed(self._paces)
        # Microbatches hold what does not fit at once, if the script has any.
        has_microbatches = self._shares.at_once is not None
        return _Measured(self._speed, pace, self._batch, len(self._times), self._memory.most, has_microbatches)


class ComputeTime:
    """Measures how long a rank computes in single steps, without the time that it waits for others.

    That is from the beginning of the step to the last gradient, and the optimizer's step. DistributedDataParallel
    reduces gradients meanwhile, and waits for them only after the last one. It has hooks only in measured steps.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where the rank computes."""
        self._device = device
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._began: Any = None
        self._has_gradients: Any = None
        # The beginning and end of each optimizer's step.
        self._steps: list[tuple[Any, Any]] = []
        self._step_began: Any = None

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of these ``parameters`` for a step's."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def begin(self) -> None:
        """Begin a step that is measured."""
        self._steps, self._step_began, self._has_gradients = [], None, None
        if not self._parameters:
            return

        # Of several microbatches the last one counts; a step has no other gradients after it.
        def note_gradients(_: object) -> None:
            self._has_gradients = self._now()

        # One optimizer's step may consist of another one's, as with zero1, and then wait for other ranks.
        def note_begin(*_: object) -> None:
            self._step_began = self._now()

        def note_end(*_: object) -> None:
            if self._step_began is not None:
                self._steps.append((self._step_began, self._now()))
                self._step_began = None

        self._hooks = [
            register_multi_grad_hook(self._parameters, note_gradients),
            register_optimizer_step_pre_hook(note_begin),
            register_optimizer_step_post_hook(note_end),
        ]
        self._began = self._now()

    def end(self) -> float | None:
        """End the step; returns its seconds. None: it was not measured, or had no backward pass."""
        if not self._hooks:
            return None
        self.close()
        if self._has_gradients is None:
            return None
        parts = [(self._began, self._has_gradients), *self._steps]
        return sum(self._seconds(*part) for part in parts)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, since: Any, until: Any) -> float:
        if self._device.type != "cuda":
            return float(until - since)
        until.synchronize()
        return float(since.elapsed_time(until)) / 1e3


# The allocator needs more than what is allocated, and so do CUDA and NCCL themselves.
_USABLE = 0.85


class SampleMemory:
    """Measures how many samples fit into the memory of a rank's GPU at once, by what single steps take."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the rank computes; only the memory of a GPU is measured."""
        self._device = device
        self._before = 0
        # The most samples that a measured step had at once.
        self._samples = 0
        self.most: int | None = None
        """How many samples fit; None on the CPU, or as long as that is unknown."""

    def begin(self) -> None:
        """Begin a step that is measured."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)

    def end(self, samples: int) -> None:
        """End the step, which had so many ``samples`` at once, at least one."""
        if self._device.type != "cuda" or samples < self._samples:
            return
        self._samples = samples
        _, total = torch.cuda.mem_get_info(self._device)
        self.most = samples_that_fit(
            total=total,
            before=self._before,
            peak=torch.cuda.max_memory_allocated(self._device),
            samples=samples,
        )


def samples_that_fit(*, total: int, before: int, peak: int, samples: int) -> int | None:
    """How many samples fit into a memory at once; None if that cannot be told.

    Args:
        total: The bytes of the memory.
        before: How many were allocated before a step.
        peak: How many were allocated at most in the step.
        samples: How many samples the greatest microbatch of the step had: so many fit in any case.
    """
    of_sample = (peak - before) / samples
    return max(samples, int((_USABLE * total - before) / of_sample)) if of_sample > 0 else None


@dataclass(frozen=True, slots=True)
class RecordedShares:
    """What ranks chose in the steps after a checkpoint."""

    choices: Mapping[int, SharesChosen] = field(default_factory=dict)
    """By the number of finished steps."""
    until: int = 0
    """How many steps were finished with them; after these nothing is recorded."""


def recorded_shares(attempts: Sequence[Attempt], step: int, ranks: int) -> RecordedShares:
    """The shares of the steps after ``step``, as computed before by this number of ``ranks``.

    Args:
        attempts: The run's attempts. Each repeats the records of the attempts before it, so that the newest choice at a
            step counts. Attempts before one that started from scratch do not count, nor do attempts before one with
            another number of ranks.
        step: The number of finished steps from which training goes on.
        ranks: The present number of ranks.
    """
    choices: dict[int, SharesChosen] = {}
    until = 0
    for attempt in attempts:
        if attempt.from_start:
            choices, until = {}, 0
        for record in attempt.shares:
            chosen = SharesChosen.from_json({key: value for key, value in record.items() if key != "at"})
            if chosen is None or chosen.step is None or min(chosen.shares, default=0) < 1:
                continue
            if len(chosen.shares) != ranks:
                choices, until = {}, 0
                continue
            choices[chosen.step] = chosen
            until = max(until, chosen.step)
        if attempt.shares and len(attempt.shares[-1]["shares"]) == ranks:
            until = max(until, attempt.last_step or 0)
    return RecordedShares({at: chosen for at, chosen in choices.items() if at > step}, until)
