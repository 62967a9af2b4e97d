"""How many samples of a batch each rank gets if ranks differ in speed, so that all need about as long. Pure.

A rank needs ``fixed_s + sample_s * n`` seconds for ``n`` samples. From times at one number of samples alone the fixed
part cannot be told; it then counts as zero, which moves too much at first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Shares change only for a step that becomes shorter by this part of its time; otherwise they would follow noise.
DEAD_BAND = 0.05
# The most of a rank's time that counts as fixed: numbers of samples that are close together say little about it.
_MOST_FIXED = 0.8
# Numbers of samples that differ by less than this part say nothing about it.
_LEAST_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a rank computes: seconds of a step without samples, and of each sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        """The time for so many ``samples``."""
        return self.fixed_s + self.sample_s * samples

    def scaled(self, factor: float) -> Speed:
        """That of a rank that takes ``factor`` times as long."""
        return Speed(self.fixed_s * factor, self.sample_s * factor)


def fit_speed(times: Mapping[int, float]) -> Speed:
    """The speed of a rank by its ``times``: seconds by numbers of samples, both positive, the latest last."""
    samples, seconds = list(times.items())[-1]
    others = [each for each in times if abs(each - samples) >= max(1, _LEAST_SPREAD * samples)]
    if not others:
        return Speed(0.0, seconds / samples)
    other = max(others, key=lambda each: abs(each - samples))
    sample_s = (seconds - times[other]) / (samples - other)
    # Noise may make more samples faster.
    sample_s = min(max(sample_s, (1 - _MOST_FIXED) * seconds / samples), seconds / samples)
    return Speed(seconds - sample_s * samples, sample_s)


def slowest_s(speeds: Sequence[Speed], shares: Sequence[int]) -> float:
    """How long the slowest rank takes. ``speeds`` and ``shares``: by rank."""
    return max(speed.seconds(share) for speed, share in zip(speeds, shares, strict=True))


def balance(
    speeds: Sequence[Speed], batch_size: int, *, unit: int = 1, most: Sequence[int | None] = ()
) -> tuple[int, ...] | None:
    """The shares of a batch with which the slowest rank is as fast as possible, each of at least one unit.

    One unit after the other goes to the rank that would then be done first, which is optimal, since more samples never
    make a rank faster.

    Args:
        speeds: By rank.
        batch_size: How many samples there are.
        unit: Shares are multiples of it, as accumulation in equal parts needs, if it divides ``batch_size``.
        most: How many samples fit into the memory of each rank; None if that is unknown.

    Returns:
        The shares, by rank; None if there are fewer units than ranks, or more samples than fit.
    """
    unit = unit if batch_size % unit == 0 else 1
    limits = [batch_size if limit is None else limit for limit in most] or [batch_size] * len(speeds)
    if batch_size < unit * len(speeds) or any(limit < unit for limit in limits):
        return None
    shares = [unit] * len(speeds)
    nexts = [(speed.seconds(2 * unit), rank) for rank, speed in enumerate(speeds) if limits[rank] >= 2 * unit]
    heapq.heapify(nexts)
    for _ in range(batch_size // unit - len(speeds)):
        if not nexts:
            return None
        _, rank = heapq.heappop(nexts)
        shares[rank] += unit
        if shares[rank] + unit <= limits[rank]:
            heapq.heappush(nexts, (speeds[rank].seconds(shares[rank] + unit), rank))
    return tuple(shares)


def is_better(speeds: Sequence[Speed], shares: Sequence[int], current: Sequence[int]) -> bool:
    """Whether a step is shorter with these ``shares`` than with the ``current`` ones by more than the dead band.

    ``speeds``: of the ranks.
    """
    return slowest_s(speeds, shares) < (1 - DEAD_BAND) * slowest_s(speeds, current)
