"""How many samples of a batch each rank gets if ranks differ in speed, so that all need about as long. Pure.

A rank needs ``fixed_s + sample_s * n`` seconds for ``n`` samples. From times at one number of samples alone the fixed
part cannot be told; it then counts as zero, which moves too much at first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurmtrain.model.data.pace import Pace

# Shares change only for a step that becomes shorter by this part of its time.
DEAD_BAND = 0.05
# What noise makes of the gain of a step with two ranks or more, in standard errors: so much, and what the greatest of
# as many values has (B. S. Everitt, A. Skrondal, The Cambridge Dictionary of Statistics: extreme values).
_NOISE = 2.0
# The most of a rank's time that counts as fixed: numbers of samples that are close together say little about it.
_MOST_FIXED = 0.8
# The standard deviation of the assumption that nothing is fixed, as a part of the time of a sample.
_ASSUMED = 0.5


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a rank computes: seconds of a step without samples, and of each sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        """The time for so many ``samples``."""
        return self.fixed_s + self.sample_s * samples

    def scaled(self, factor: float) -> Speed:
        """The speed of a rank that takes ``factor`` times as long."""
        return Speed(self.fixed_s * factor, self.sample_s * factor)


def fit_speed(paces: Mapping[int, Pace]) -> Speed:
    """The speed of a rank by its ``paces``, by numbers of samples, which are positive; the latest last.

    Two numbers of samples tell the time of a sample the better, the further apart they are and the less their times
    scatter. The less they tell, the more does the assumption count that nothing is fixed: both are estimates, weighted
    by the inverses of their variances.
    """
    samples, pace = list(paces.items())[-1]
    at_most = pace.seconds / samples
    sample_s = at_most
    others = [each for each in paces if each != samples]
    if others:
        other = max(others, key=lambda each: abs(each - samples))
        before = paces[other]
        apart = samples - other
        error_s = math.hypot(pace.seconds * pace.error, before.seconds * before.error) / abs(apart)
        weight = 1 / (1 + (error_s / (_ASSUMED * at_most)) ** 2)
        sample_s = weight * (pace.seconds - before.seconds) / apart + (1 - weight) * at_most
        # Noise may make more samples faster.
        sample_s = min(max(sample_s, (1 - _MOST_FIXED) * at_most), at_most)
    return Speed(pace.seconds - sample_s * samples, sample_s)


def slowest_s(speeds: Sequence[Speed], shares: Sequence[int]) -> float:
    """How long the slowest rank takes. ``speeds`` and ``shares``: by rank."""
    return max(speed.seconds(share) for speed, share in zip(speeds, shares, strict=True))


def balance(speeds: Sequence[Speed], batch_size: int, *, most: Sequence[int | None] = ()) -> tuple[int, ...] | None:
    """The shares of a batch with which the slowest rank is as fast as possible, each of at least one sample.

    One sample after the other goes to the rank that would then be done first, which is optimal, since more samples
    never make a rank faster.

    Args:
        speeds: By rank.
        batch_size: How many samples there are.
        most: How many samples each rank can have; None if that is unknown.

    Returns:
        The shares, by rank; None if there are fewer samples than ranks, or more than these can have.
    """
    limits = [batch_size if limit is None else limit for limit in most] or [batch_size] * len(speeds)
    if batch_size < len(speeds):
        return None
    shares = [1] * len(speeds)
    nexts = [(speed.seconds(2), rank) for rank, speed in enumerate(speeds) if limits[rank] >= 2]
    heapq.heapify(nexts)
    for _ in range(batch_size - len(speeds)):
        if not nexts:
            return None
        _, rank = heapq.heappop(nexts)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(nexts, (speeds[rank].seconds(shares[rank] + 1), rank))
    return tuple(shares)


class ShareAdvice(Enum):
    """What to do with the shares that suit the speeds of ranks as far as these are known."""

    CHANGE = "change"
    """Divide batches by them."""
    KEEP = "keep"
    """Leave the current ones, which are as good."""
    WAIT = "wait"
    """Measure more steps: the gain may be noise."""


def judge(
    speeds: Sequence[Speed], errors: Sequence[float], shares: Sequence[int], current: Sequence[int]
) -> ShareAdvice:
    """Whether to replace the ``current`` shares by the ``shares`` that :func:`balance` has chosen for ``speeds``.

    A step takes as long as its slowest rank. With the other shares all ranks take equally long, about the mean of their
    times weighted by samples. So the error of the slowest rank counts by one minus its weight in that mean, and the
    errors of the other ranks by their weights. With more ranks, the slowest of equally fast ranks is further from the
    mean.

    Args:
        speeds: Speed of each rank.
        errors: The standard errors of their times, as parts of these.
        shares: The new shares, by rank.
        current: The present shares, by rank.
    """
    before, after = slowest_s(speeds, current), slowest_s(speeds, shares)
    if after >= (1 - DEAD_BAND) * before:
        return ShareAdvice.KEEP
    slowest = max(range(len(speeds)), key=lambda rank: speeds[rank].seconds(current[rank]))
    parts = [share / sum(shares) for share in shares]
    error = math.hypot(*(((rank == slowest) - parts[rank]) * each for rank, each in enumerate(errors)))
    noise = (_NOISE + math.sqrt(2 * math.log(len(speeds)))) * error
    return ShareAdvice.CHANGE if math.log(before / after) > noise else ShareAdvice.WAIT
