"""Which nodes of an allocation have ranks after a restart in place: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from slurmtrain.model.experiment.values import Nodes

# A node whose ranks have failed this often is left out if others can take its place.
_TOO_OFTEN = 2


def choose_members(allocated: int, count: Nodes, *, lost: Collection[int], blamed: Sequence[int]) -> list[int] | None:
    """The nodes of the next round, out of ``allocated`` nodes numbered from 0; None if there are too few.

    ``count``: how many nodes are to have ranks. ``lost``: nodes that are gone. ``blamed``: nodes whose ranks have
    failed, a node once for each failure. Node 0 is always chosen, since it hosts the rendezvous.
    """
    often = {node for node, times in Counter(blamed).items() if times >= _TOO_OFTEN and node != 0}
    alive = [node for node in range(allocated) if node not in lost]
    if 0 not in alive or len(alive) < count.min:
        return None
    good = [node for node in alive if node not in often]
    chosen = good if len(good) >= count.min else [*good, *(node for node in alive if node in often)][: count.min]
    return sorted(chosen[: count.max])
