"""Which nodes have ranks when these are started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.members import choose_members
from slurmtrain.model.spec.values import Nodes

numbers = st.integers(0, 7)


def test_as_many_nodes_as_the_spec_asks_for_take_part_and_spare_ones_stand_by() -> None:
    assert choose_members(4, Nodes(4, 4), lost=(), blamed=()) == [0, 1, 2, 3]
    assert choose_members(6, Nodes(4, 4), lost=(), blamed=()) == [0, 1, 2, 3]
    assert choose_members(3, Nodes(2, 4), lost=(), blamed=()) == [0, 1, 2]


def test_a_spare_node_comes_in_for_one_that_is_lost() -> None:
    assert choose_members(5, Nodes(4, 4), lost={2}, blamed=()) == [0, 1, 3, 4]


def test_a_run_continues_with_fewer_nodes_down_to_its_minimum() -> None:
    assert choose_members(4, Nodes(2, 4), lost={1, 3}, blamed=()) == [0, 2]
    assert choose_members(4, Nodes(2, 4), lost={1, 2, 3}, blamed=()) is None


def test_there_are_no_members_without_node_0() -> None:
    assert choose_members(4, Nodes(1, 4), lost={0}, blamed=()) is None


def test_a_node_that_failed_once_stays_and_one_that_failed_twice_is_left_out() -> None:
    assert choose_members(3, Nodes(2, 2), lost=(), blamed=[1]) == [0, 1]
    assert choose_members(3, Nodes(2, 2), lost=(), blamed=[1, 1]) == [0, 2]


def test_a_node_that_fails_again_and_again_stays_where_nobody_can_take_its_place() -> None:
    assert choose_members(2, Nodes(2, 2), lost=(), blamed=[1, 1, 1]) == [0, 1]
    assert choose_members(3, Nodes(2, 2), lost={2}, blamed=[1, 1, 1]) == [0, 1]


def test_node_0_stays_however_often_it_fails() -> None:
    assert choose_members(3, Nodes(2, 2), lost=(), blamed=[0, 0, 0]) == [0, 1]


@pytest.mark.parametrize("blamed", [[1, 1, 2, 2], [2, 1, 2, 1]])
def test_if_all_nodes_fail_the_first_ones_are_chosen(blamed: list[int]) -> None:
    assert choose_members(3, Nodes(2, 3), lost=(), blamed=blamed) == [0, 1]


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
