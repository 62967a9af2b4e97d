"""Which ranks hold the others up: pure.

In a collective all ranks wait for the slowest, so that steps take equally long on all of them. What tells is the time
that each takes of its own, before it waits for others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

RATIO = 1.5
# Looks in a row, of those that are made each ten seconds or so: what is slow for less than that soon passes by itself.
LOOKS = 5
# Within this, two ranks of one node differ by the interpreter and the kernel's scheduler alone.
LEAST_S = 0.005


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes ``ratio`` times as long as the median rank for its own part of a step. Times are seconds."""

    rank: int
    own_s: float
    median_s: float
    ratio: float


class Stragglers:
    """Tells which ranks have become slower than others, each once, and again if it has recovered in between."""

    def __init__(self, ratio: float = RATIO, looks: int = LOOKS, least_s: float = LEAST_S) -> None:
        """A rank is slow beyond ``ratio`` times the median and ``least_s`` seconds more than it, ``looks`` in a row.

        As many looks without that mean that it has recovered.
        """
        self._ratio = ratio
        self._looks = looks
        self._least_s = least_s
        # Looks in a row in which a rank was not what it was last said to be.
        self._changed: dict[int, int] = {}
        self._slow: set[int] = set()

    def look(self, own_s: Mapping[int, float]) -> list[Straggler]:
        """Take in what a step takes of each rank's own time, in seconds; 0 is not known. Returns new stragglers."""
        known = {rank: took for rank, took in own_s.items() if took > 0}
        if len(known) < 2:
            return []
        # Of two ranks the faster one is the measure.
        median = statistics.median_low(known.values())
        found = []
        for rank, took in sorted(known.items()):
            is_slow = took > self._ratio * median and took > median + self._least_s
            if self._turns(rank, is_slow) and is_slow:
                found.append(Straggler(rank, took, median, took / median))
        return found

    def _turns(self, rank: int, is_slow: bool) -> bool:
        """Whether this look is the last that it takes for a rank to count as slow, or no longer so."""
        if is_slow == (rank in self._slow):
            self._changed.pop(rank, None)
            return False
        self._changed[rank] = self._changed.get(rank, 0) + 1
        if self._changed[rank] < self._looks:
            return False
        del self._changed[rank]
        self._slow ^= {rank}
        return True
