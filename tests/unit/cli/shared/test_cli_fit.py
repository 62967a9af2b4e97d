"""Which columns of a table fit on a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.cli.shared.fit import GAP, Column, fit, fit_wrapped

ID, NAME, STEP, REASON = Column("ID"), Column("NAME", room=8), Column("STEP", rank=1), Column("R", rank=2, room=6)
COLUMNS = (ID, NAME, STEP, REASON)


def used(widths: dict[int, int]) -> int:
    """How many cells the columns take."""
    return sum(widths.values()) + GAP * (len(widths) - 1)


def test_what_fits_is_shown_whole() -> None:
    assert fit(COLUMNS, (10, 20, 5, 30), 10 + 20 + 5 + 30 + 3 * GAP) == {0: 10, 1: 20, 2: 5, 3: 30}


def test_a_column_without_content_is_left_out() -> None:
    assert fit(COLUMNS, (10, 4, 0, 3), 80) == {0: 10, 1: 4, 3: 3}


def test_what_is_cut_gets_the_room_that_is_left() -> None:
    assert fit(COLUMNS, (10, 20, 5, 30), 50) == {0: 10, 1: 15, 2: 5, 3: 14}


def test_a_column_for_which_there_is_no_room_makes_room_for_a_narrower_one() -> None:
    assert fit((ID, Column("WIDE", rank=1), Column("STEP", rank=2)), (10, 30, 5), 20) == {0: 10, 2: 5}


def test_a_column_of_a_lower_rank_gets_its_room_first() -> None:
    assert fit((ID, Column("LATER", rank=2), Column("FIRST", rank=1)), (10, 5, 5), 20) == {0: 10, 2: 5}


def test_columns_that_are_always_shown_are_cut_where_they_may_be() -> None:
    assert fit(COLUMNS, (10, 20, 5, 30), 17) == {0: 10, 1: 5}
    assert fit(COLUMNS, (10, 20, 5, 30), 3) == {0: 10, 1: 4}


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.integers(20, 240))
def test_a_table_is_never_wider_than_the_terminal_and_uses_its_width(content: list[int], width: int) -> None:
    content[0] = min(content[0], 10)
    widths = fit(COLUMNS, content, width)
    assert used(widths) <= width
    assert all(wide <= content[index] for index, wide in widths.items())
    if any(widths[index] < content[index] for index in widths):
        assert used(widths) == width


def test_the_column_that_wraps_gets_what_the_others_leave() -> None:
    assert fit_wrapped((10, 5, 90), 20, 60) == [10, 5, 60 - 15 - 2 * GAP]
    assert fit_wrapped((10, 5, 9), 9, 60) == [10, 5, 9]


def test_the_widest_columns_are_cut_before_the_column_that_wraps_is_unreadable() -> None:
    assert fit_wrapped((30, 5, 90), 20, 40) == [11, 5, 20]
    assert fit_wrapped((30, 30, 5), 5, 10) == [4, 4, 5]
    assert fit_wrapped((30,), 10, 20) == [20]
