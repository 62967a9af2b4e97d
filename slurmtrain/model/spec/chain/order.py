"""The order of creation of the specs of one submission: each after the specs whose runs must end first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def find_cycle(after: Mapping[int, Sequence[int]]) -> list[int]:
    """Specs that wait for each other, each for the one behind it, the first again at the end; empty if there are none.

    ``after``: by the number of each spec, the numbers of the specs that it waits for.
    """
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        # Python names each before the one that waits for it.
        return list(reversed(error.args[1]))
    return []


def creation_order(after: Mapping[int, Sequence[int]]) -> list[int]:
    """The numbers of specs, each behind the specs that it waits for, otherwise in order; they have no cycle."""
    sorter = TopologicalSorter(after)
    sorter.prepare()
    order: list[int] = []
    ready = list(sorter.get_ready())
    while ready:
        ready.sort()
        first = ready.pop(0)
        order.append(first)
        sorter.done(first)
        ready += sorter.get_ready()
    return order
