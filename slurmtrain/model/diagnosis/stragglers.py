"""Which ranks slow the others down. Pure.

In a collective all ranks wait for the slowest one, so steps take equally long on all of them. Ranks differ only in
their own time: what a step takes before the rank begins to wait for others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

# A rank is slow if its own time is this many times the median.
RATIO = 1.5
# How many consecutive looks it must be slow for, at about one look in ten seconds: shorter disturbances pass.
LOOKS = 5
# The interpreter and the kernel's scheduler alone make two ranks of one node differ by up to this.
LEAST_S = 0.005


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose own time per step is ``ratio`` times the median rank's. Times are in seconds."""

    rank: int
    own_s: float
    median_s: float
    ratio: float


class Stragglers:
    """Detects ranks that have become slower than others: each is reported once, and again if it recovers in between."""

    def __init__(self, ratio: float = RATIO, looks: int = LOOKS, least_s: float = LEAST_S) -> None:
        """Set the limits.

        Args:
            ratio: A slow rank's own time is more than this many times the median.
            looks: After this many consecutive looks a rank counts as slow, and after as many as normal again.
            least_s: A slow rank's own time is more than this many seconds above the median.
        """
        self._ratio = ratio
        self._looks = looks
        self._least_s = least_s
        # By rank: for how many consecutive looks its state has differed from that in ``_slow``.
        self._changed: dict[int, int] = {}
        self._slow: set[int] = set()

    def look(self, own_s: Mapping[int, float]) -> list[Straggler]:
        """Record each rank's own time per step, in seconds (0: unknown), and return the ranks that became slow."""
        measured = {rank: seconds for rank, seconds in own_s.items() if seconds > 0}
        if len(measured) < 2:
            return []
        # The lower median: with two ranks, the slow one must not be its own yardstick.
        median = statistics.median_low(measured.values())
        stragglers = []
        for rank, seconds in sorted(measured.items()):
            is_slow = seconds > self._ratio * median and seconds > median + self._least_s
            if self._turns(rank, is_slow) and is_slow:
                stragglers.append(Straggler(rank, seconds, median, seconds / median))
        return stragglers

    def _turns(self, rank: int, is_slow: bool) -> bool:
        """Whether with this look a rank starts, or stops, counting as slow."""
        if is_slow == (rank in self._slow):
            self._changed.pop(rank, None)
            return False
        self._changed[rank] = self._changed.get(rank, 0) + 1
        if self._changed[rank] < self._looks:
            return False
        del self._changed[rank]
        self._slow ^= {rank}
        return True
