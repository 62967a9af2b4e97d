"""Which columns of a table fit on a terminal, and how wide they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Cells between two columns.
GAP = 2
# The narrowest that a column is cut to: a character and an ellipsis say nothing.
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table whose rows are one line each.

    ``room``: least width that makes it worth showing if its content is wider, which is then cut, in cells; None: all of
    its content. ``rank``: columns of a lower rank get their room first; columns of rank 0 are shown on any terminal.
    """

    header: str
    rank: int = 0
    room: int | None = None


def fit(columns: Sequence[Column], content: Sequence[int], width: int) -> dict[int, int]:
    """The widths of the columns that are shown, by their index, in cells.

    Args:
        columns: The columns, from left to right.
        content: How wide the widest cell of each is, with its header; 0: it is empty, and left out.
        width: How wide the terminal is.
    """
    needs = [
        wide if column.room is None else min(wide, column.room) for column, wide in zip(columns, content, strict=True)
    ]
    shown: dict[int, int] = {}
    left = width + GAP
    for index in sorted(range(len(columns)), key=lambda index: columns[index].rank):
        if content[index] and (columns[index].rank == 0 or needs[index] + GAP <= left):
            shown[index] = needs[index]
            left -= needs[index] + GAP
    shown = dict(sorted(shown.items()))
    return _narrow(shown, columns, -left) if left < 0 else _widen(shown, content, left)


def fit_wrapped(content: Sequence[int], least: int, width: int) -> list[int]:
    """The widths of columns; the last is wrapped, and the widest others are cut if there is no other way.

    Args:
        content: How wide the widest cell of each column is, with its header, in cells.
        least: Least readable width of the last column, in cells.
        width: How wide the terminal is.
    """
    *others, last = content
    width -= GAP * len(others)
    last = min(last, max(least, width - sum(others)))
    while others and sum(others) + last > width and max(others) > _LEAST:
        others[others.index(max(others))] -= 1
    return [*others, last]


def _narrow(shown: dict[int, int], columns: Sequence[Column], excess: int) -> dict[int, int]:
    """Take ``excess`` cells from columns that may be cut, the last first; as far as that goes."""
    narrowed = dict(shown)
    for index in reversed(shown):
        if columns[index].room is not None:
            reduction = min(excess, max(0, narrowed[index] - _LEAST))
            narrowed[index] -= reduction
            excess -= reduction
    return narrowed


def _widen(shown: dict[int, int], content: Sequence[int], left: int) -> dict[int, int]:
    """Give ``left`` cells to the columns that are cut, in equal parts, the last getting what others do not need."""
    widened = dict(shown)
    cut = sorted((index for index in shown if shown[index] < content[index]), key=lambda i: content[i] - shown[i])
    for position, index in enumerate(cut):
        growth = min(content[index] - shown[index], left // (len(cut) - position))
        widened[index] += growth
        left -= growth
    return widened
