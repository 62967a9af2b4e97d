"""How the ranks of a run are placed on its nodes; nodes of different components may have different numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """How many ranks each node has that takes part, in the order of the nodes: ranks are counted node by node."""

    counts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(self.counts)

    @property
    def are_equal(self) -> bool:
        """Whether all nodes have equally many."""
        return len(set(self.counts)) <= 1

    def ranks_of(self, place: int) -> range:
        """The ranks of the node at a ``place`` among the nodes that take part, from 0."""
        first = sum(self.counts[:place])
        return range(first, first + self.counts[place])

    def place_of(self, rank: int) -> int:
        """The place of the node that has a ``rank``."""
        return next(place for place, end in enumerate(accumulate(self.counts)) if rank < end)
