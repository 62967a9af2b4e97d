"""Which nodes have ranks when these are started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.values import Nodes
from slurmtrain.model.interruption.members import (
    GATHERING_S,
    Newcomer,
    Stage,
    choose_members,
    choose_newcomers,
    is_worthwhile,
    pause_before_request,
)

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


# --- which nodes join a run while it trains, and when -------------------------------------------------------------


def newcomer(number: int, job_id: str = "8", job_nodes: int = 1) -> Newcomer:
    return Newcomer(number=number, host=f"n{number}", job_id=job_id, job_nodes=job_nodes)


def test_the_nodes_of_a_job_join_together() -> None:
    first, second = newcomer(1, job_nodes=2), newcomer(2, job_nodes=2)
    assert choose_newcomers({1: 5.0}, [first], room=3) == []
    assert choose_newcomers({1: 5.0, 2: 0.0}, [second, first], room=3) == [first, second]


def test_a_node_joins_without_the_others_of_its_job_if_they_do_not_come() -> None:
    first = newcomer(1, job_nodes=2)
    assert choose_newcomers({1: GATHERING_S}, [first], room=3) == [first]


def test_a_run_does_not_stop_for_nodes_just_before_its_time_limit() -> None:
    # Half of the time that is left would be saved.
    assert is_worthwhile(1, 2, cost_s=20.0, left_s=41.0)
    assert not is_worthwhile(1, 2, cost_s=20.0, left_s=40.0)
    assert not is_worthwhile(30, 32, cost_s=20.0, left_s=300.0)
    assert is_worthwhile(30, 32, cost_s=20.0, left_s=None)
    assert not is_worthwhile(2, 2, cost_s=0.0, left_s=None)


def test_requests_follow_each_other_more_and_more_slowly() -> None:
    assert [pause_before_request(number) for number in range(4)] == [0.0, 60.0, 120.0, 240.0]
    assert pause_before_request(1000) == 3600.0


def test_the_next_stage_has_those_who_are_left_and_the_newcomers() -> None:
    hosts = {0: "a", 1: "b", 2: "c"}
    stage = Stage.first(3).grown([newcomer(5), newcomer(6, job_id="9")], hosts, round=4, lost={1})
    assert (stage.roster, stage.hosts, stage.before) == ((0, 2, 5, 6), ("a", "c", "n5", "n6"), (0, 2))
    assert [stage.place_of(number) for number in (0, 1, 2, 5)] == [0, None, 1, 2]
    assert (stage.places_of_job("8"), stage.places_of_job(""), stage.job_of(1)) == ([2], [], "")
    assert stage.newcomers() == {"8": ["n5"], "9": ["n6"]}
    later = stage.grown([newcomer(7, job_id="10")], dict(enumerate(stage.hosts)), round=6, lost={3})
    assert (later.roster, later.jobs) == ((0, 2, 5, 7), ("", "", "8", "10"))
    assert later.newcomers() == {"10": ["n7"]}


def test_those_who_were_there_before_go_on_without_newcomers() -> None:
    stage = Stage.first(2).grown([newcomer(2)], {0: "a", 1: "b"}, round=1, lost=())
    alone = stage.without_newcomers()
    assert (alone.roster, alone.hosts, alone.round, alone.before) == ((0, 1), ("a", "b"), 2, ())


@given(st.lists(st.integers(1, 50), unique=True), st.integers(1, 5), st.integers(0, 9))
def test_a_stage_and_a_newcomer_are_the_same_after_they_were_written(
    numbers: list[int], nodes: int, round_number: int
) -> None:
    joining = [newcomer(nodes + number) for number in numbers]
    stage = Stage.first(nodes).grown(joining, {}, round=round_number, lost={nodes - 1} - {0})
    assert Stage.from_dict(stage.to_dict()) == stage
    assert [Newcomer.from_dict(each.to_dict()) for each in joining] == joining
    assert [stage.roster[stage.place_of(each.number) or 0] for each in joining] == [each.number for each in joining]
