"""Which columns of a table fit on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.cli.shared.fit import GAP, Column, fit, fit_wrapped

ID, NAME, STEP, REASON = Column("ID"), Column("NAME", room=8), Column("STEP", rank=1), Column("R", rank=2, room=6)
COLUMNS = (ID, NAME, STEP, REASON)
WIDE_FIRST = (ID, Column("WIDE", rank=1), Column("STEP", rank=2))
RANKED = (ID, Column("LATER", rank=2), Column("FIRST", rank=1))


@pytest.mark.parametrize(
    ("columns", "content", "width", "expected"),
    [
        pytest.param(COLUMNS, (10, 20, 5, 30), 65 + 3 * GAP, {0: 10, 1: 20, 2: 5, 3: 30}, id="what fits is whole"),
        pytest.param(COLUMNS, (10, 4, 0, 3), 80, {0: 10, 1: 4, 3: 3}, id="a column without content is left out"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 50, {0: 10, 1: 15, 2: 5, 3: 14}, id="what is cut gets what is left"),
        pytest.param(WIDE_FIRST, (10, 30, 5), 20, {0: 10, 2: 5}, id="one without room makes room for a narrower one"),
        pytest.param(RANKED, (10, 5, 5), 20, {0: 10, 2: 5}, id="a lower rank gets its room first"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 17, {0: 10, 1: 5}, id="what is always shown is cut where it may be"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 3, {0: 10, 1: 4}, id="but no further"),
    ],
)
def test_columns_get_the_room_that_there_is(
    columns: Sequence[Column], content: Sequence[int], width: int, expected: dict[int, int]
) -> None:
    assert fit(columns, content, width) == expected


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.integers(20, 240))
def test_a_table_is_never_wider_than_the_terminal_and_uses_its_width(content: list[int], width: int) -> None:
    content[0] = min(content[0], 10)
    widths = fit(COLUMNS, content, width)
    used = sum(widths.values()) + GAP * (len(widths) - 1)
    assert used <= width
    assert all(wide <= content[index] for index, wide in widths.items())
    if any(widths[index] < content[index] for index in widths):
        assert used == width


@pytest.mark.parametrize(
    ("content", "least", "width", "expected"),
    [
        ((10, 5, 90), 20, 60, [10, 5, 60 - 15 - 2 * GAP]),
        ((10, 5, 9), 9, 60, [10, 5, 9]),
        # The widest columns are cut before the one that wraps is unreadable.
        ((30, 5, 90), 20, 40, [11, 5, 20]),
        ((30, 30, 5), 5, 10, [4, 4, 5]),
        ((30,), 10, 20, [20]),
    ],
)
def test_the_column_that_wraps_gets_what_the_others_leave(
    content: tuple[int, ...], least: int, width: int, expected: list[int]
) -> None:
    assert fit_wrapped(content, least, width) == expected
