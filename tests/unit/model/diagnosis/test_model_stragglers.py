"""Which ranks hold the others up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.stragglers import LOOKS, Straggler, Stragglers

EVEN = dict.fromkeys(range(4), 0.100)
SLOW = EVEN | {2: 0.200}


def looks(stragglers: Stragglers, *times: dict[int, float], count: int = LOOKS) -> list[Straggler]:
    return [found for own_s in times for _ in range(count) for found in stragglers.look(own_s)]


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    stragglers = Stragglers()
    assert looks(stragglers, SLOW, count=LOOKS - 1) == []
    assert looks(stragglers, SLOW, count=1) == [Straggler(2, 0.200, 0.100, 2.0)]
    assert looks(stragglers, SLOW, SLOW, SLOW) == []


def test_a_short_disturbance_is_not_reported() -> None:
    stragglers = Stragglers()
    for _ in range(5):
        assert looks(stragglers, SLOW, count=LOOKS - 1) == []
        assert looks(stragglers, EVEN, count=1) == []


def test_a_rank_is_reported_again_only_if_it_has_recovered() -> None:
    stragglers = Stragglers()
    assert len(looks(stragglers, SLOW)) == 1
    looks(stragglers, EVEN, count=LOOKS - 1)
    assert looks(stragglers, SLOW) == []
    looks(stragglers, EVEN)
    assert len(looks(stragglers, SLOW)) == 1


def test_a_difference_of_a_few_milliseconds_is_no_straggler() -> None:
    assert looks(Stragglers(), {0: 0.001, 1: 0.001, 2: 0.0059}) == []
    assert len(looks(Stragglers(), {0: 0.001, 1: 0.001, 2: 0.0061})) == 1


def test_of_two_ranks_the_slower_one_is_found() -> None:
    assert [found.rank for found in looks(Stragglers(), {0: 0.3, 1: 0.1})] == [0]


def test_a_rank_whose_time_is_not_known_is_neither_slow_nor_a_measure() -> None:
    assert looks(Stragglers(), {0: 0.0, 1: 0.0, 2: 0.1}) == []
    assert looks(Stragglers(), {0: 0.1, 1: 0.0, 2: 0.0, 3: 0.1}) == []
    stragglers = Stragglers()
    looks(stragglers, SLOW, count=LOOKS - 1)
    looks(stragglers, SLOW | {2: 0.0})
    assert len(looks(stragglers, SLOW, count=1)) == 1


@given(st.lists(st.dictionaries(st.integers(0, 5), st.floats(0, 10)), max_size=40))
def test_most_ranks_are_never_stragglers_and_each_is_slower_than_the_median(times: list[dict[int, float]]) -> None:
    stragglers = Stragglers(looks=1)
    for own_s in times:
        slow = stragglers.look(own_s)
        assert len(slow) <= len(own_s) / 2
        assert all(rank.own_s == own_s[rank.rank] > 1.5 * rank.median_s for rank in slow)
