"""Which nodes have ranks when these are started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.values import Nodes
from slurmtrain.model.interruption.members import choose_members

numbers = st.integers(0, 7)


@pytest.mark.parametrize(
    ("allocated", "count", "lost", "blamed", "members"),
    [
        # As many as the spec asks for take part, and spare ones stand by, for one that is lost.
        (4, Nodes(4, 4), [], [], [0, 1, 2, 3]),
        (6, Nodes(4, 4), [], [], [0, 1, 2, 3]),
        (3, Nodes(2, 4), [], [], [0, 1, 2]),
        (5, Nodes(4, 4), [2], [], [0, 1, 3, 4]),
        # A run continues with fewer, down to its minimum, and never without node 0.
        (4, Nodes(2, 4), [1, 3], [], [0, 2]),
        (4, Nodes(2, 4), [1, 2, 3], [], None),
        (4, Nodes(1, 4), [0], [], None),
        # One that failed once stays, and one that failed twice is left out if another can take its place.
        (3, Nodes(2, 2), [], [1], [0, 1]),
        (3, Nodes(2, 2), [], [1, 1], [0, 2]),
        (2, Nodes(2, 2), [], [1, 1, 1], [0, 1]),
        (3, Nodes(2, 2), [2], [1, 1, 1], [0, 1]),
        (3, Nodes(2, 2), [], [0, 0, 0], [0, 1]),
        (3, Nodes(2, 3), [], [1, 1, 2, 2], [0, 1]),
        (3, Nodes(2, 3), [], [2, 1, 2, 1], [0, 1]),
    ],
)
def test_which_nodes_take_part(
    allocated: int, count: Nodes, lost: list[int], blamed: list[int], members: list[int] | None
) -> None:
    assert choose_members(allocated, count, lost=lost, blamed=blamed) == members


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 7), st.sets(numbers), st.lists(numbers, max_size=12))
def test_the_chosen_nodes_are_enough_alive_and_the_same_whatever_the_order(
    allocated: int, least: int, more: int, lost: set[int], blamed: list[int]
) -> None:
    count = Nodes(least, least + more)
    chosen = choose_members(allocated, count, lost=lost, blamed=blamed)
    alive = set(range(allocated)) - lost
    assert (chosen is None) == (0 in lost or len(alive) < least)
    assert choose_members(allocated, count, lost=sorted(lost, reverse=True), blamed=blamed[::-1]) == chosen
    if chosen is None:
        return
    assert 0 in chosen
    assert set(chosen) <= alive
    assert chosen == sorted(set(chosen))
    assert least <= len(chosen) <= count.max
    # Whoever is left out failed often, or is one too many.
    if len(chosen) < min(count.max, len(alive)):
        assert all(blamed.count(node) >= 2 for node in alive - set(chosen))
