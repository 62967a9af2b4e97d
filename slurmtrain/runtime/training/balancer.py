"""Shares of a batch that suit the speeds of ranks: measured in the steps of the training itself.

The first steps have equal shares, then such that are in proportion to the speeds of these. With two numbers of samples
the fixed part of the time is known, too. After that the shares stay, until a rank needs another time than expected. A
rank says so in the ranks' vote; only if one has, all exchange their speeds, and each computes the same shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

import torch
from torch import nn

from slurmtrain.errors import StrategyError
from slurmtrain.model.data.balance import Speed, balance, fit_speed, is_better, slowest_s
from slurmtrain.model.run.events.rank import SharesChosen
from slurmtrain.runtime.data.shares import Shares
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.compute_time import ComputeTime, samples_that_fit

# The median of so many steps is a rank's time.
STEPS = 5
# At first so many are not measured: they warm up, or load their data anew.
_WARM_UP = 2
# How often shares are chosen before they stay.
_ROUNDS = 3
# A rank whose time differs by this part from the expected one calls for other shares.
_DRIFT = 0.25


class Balancer:
    """Measures this rank, and chooses the shares together with the others."""

    def __init__(self, shares: Shares, ranks: RankGroup, unit: int) -> None:
        """``shares``: which it changes. ``ranks``: of the session. ``unit``: shares are multiples of it if possible."""
        self._shares = shares
        self._ranks = ranks
        self._unit = unit
        self._clock = ComputeTime(ranks.device)
        self._times: deque[float] = deque(maxlen=STEPS)
        # The seconds of a step by numbers of samples, the latest last.
        self._points: dict[int, float] = {}
        self._speed: Speed | None = None
        self._rounds = _ROUNDS
        self._skipped = _WARM_UP
        self._batch: tuple[int, int] | None = None
        self._allocated = 0
        self._most: tuple[int, int | None] = (0, None)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure until the gradients of these ``parameters`` are there."""
        self._clock.watch(parameters)

    def begin(self, *, due: bool) -> None:
        """Begin a step; ``due``: ranks agree after it. During the first rounds, each step is measured."""
        if self._rounds or due:
            self._shares.samples_taken = None
            if self._ranks.device.type == "cuda":
                self._allocated = torch.cuda.memory_allocated(self._ranks.device)
            self._clock.begin()

    def end(self) -> None:
        """End a step. Raises StrategyError if the script has not taken its share."""
        seconds, batch = self._clock.end(), self._shares.samples_taken
        if seconds is None:
            return
        if batch is None:
            raise StrategyError(
                "the spec has 'resources.mixed: true', and the script gives each process as much: take the samples of "
                "this one by run.share(batch), or load them with run.loader(...)"
            )
        if self._batch is None or (batch != self._batch and batch[1] >= self._batch[1]):
            self._batch = batch
            self._times.clear()
        if self._skipped:
            self._skipped -= 1
        elif batch == self._batch:
            self._times.append(seconds)
            if batch[0] >= self._most[0]:
                self._most = batch[0], samples_that_fit(self._ranks.device, self._allocated, batch[0])

    @property
    def calls(self) -> bool:
        """Whether this rank calls for shares to be chosen now."""
        if len(self._times) < STEPS or self._batch is None:
            return False
        if self._rounds or self._speed is None:
            return True
        return abs(median(self._times) / self._speed.seconds(self._batch[0]) - 1) > _DRIFT

    def choose(self, step: int) -> SharesChosen | None:
        """Choose shares after ``step`` finished steps; call it on all ranks. Returns what to journal, if anything."""
        own = self._measured_speed()
        gathered = self._ranks.gather((own, self._batch, self._most[1]))
        speeds = [speed for speed, _, _ in gathered if speed is not None]
        batches = [batch for _, batch, _ in gathered if batch is not None]
        # The script may have given ranks different batches.
        if len(speeds) < len(gathered) or len(batches) < len(gathered) or len({size for _, size in batches}) != 1:
            return None
        current, size = tuple(samples for samples, _ in batches), batches[0][1]
        self._speed = own
        self._times.clear()
        better = balance(speeds, size, unit=self._unit, most=[most for _, _, most in gathered])
        changes = better is not None and is_better(speeds, better, current)
        is_settled = not self._rounds
        self._rounds = max(0, self._rounds - 1) if changes else 0
        if better is not None and changes:
            self._shares.change(better)
            self._batch, self._skipped = None, 1
        elif is_settled:
            return None
        shares = better if better is not None and changes else current
        return SharesChosen(
            step=step,
            shares=shares,
            fixed_s=[round(speed.fixed_s, 6) for speed in speeds],
            sample_s=[round(speed.sample_s, 9) for speed in speeds],
            step_s=round(slowest_s(speeds, shares), 6),
            before_s=round(slowest_s(speeds, current), 6),
        )

    def close(self) -> None:
        """Stop measuring."""
        self._clock.close()

    def _measured_speed(self) -> Speed | None:
        if not self._times or self._batch is None:
            return self._speed
        samples, seconds = self._batch[0], median(self._times)
        if self._speed is not None and not self._rounds:
            # All of the rank became slower or faster.
            return self._speed.scaled(seconds / self._speed.seconds(samples))
        self._points.pop(samples, None)
        self._points[samples] = seconds
        return fit_speed(self._points)
