"""How tables are drawn on a terminal: which columns fit, how wide they are, and how text is shortened. Pure.

What is shortened has an ellipsis, and keeps what tells it apart from the rest of its column. Columns without room are
named, so that nothing disappears in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.cli.output import printable
from slurmtrain.model.query.folding import common_beginning

if TYPE_CHECKING:
    from rich.text import Text

STATE_STYLES = {
    "running": "cyan", "completed": "green", "failed": "red", "lost": "red", "cancelled": "yellow",
    "pending": "magenta", "unreadable": "red",
}  # fmt: skip
# Cells between two columns.
GAP = 2
# The narrowest that a column is cut to: a character and an ellipsis say nothing.
LEAST = 4
# Cells that show that there is nothing to show.
_EMPTY = ("", "-")
# Where parts of an entry continue on lines of their own, if there are fewer cells beside its beginning.
_LEAST_BESIDE, _INDENT = 30, 2
_BEGINNING = re.compile(r".*[-_/ ]", re.S)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``cell``: the text of a record, such as RUN of the JSON, in this column. ``room``: the least width that makes the
    column worth showing if its content is wider, which is then cut, in cells; None: all of its content, which is never
    cut. ``rank``: columns of a lower rank get their room first; columns of rank 0 are shown on any terminal with room
    for more than what is never cut. ``fitted``: shortens the texts of records to a width; None: their ends are cut.
    ``wraps``: a longer text continues on further lines, and is not cut. ``short``: the title where the whole one has no
    room.
    """

    title: str
    cell: Callable[[Any], str] = str
    room: int | None = None
    rank: int = 0
    fitted: Callable[[Sequence[Any], int], Sequence[str]] | None = field(default=None, kw_only=True)
    wraps: bool = field(default=False, kw_only=True)
    short: str = field(default="", kw_only=True)

    def title_within(self, width: int) -> str:
        """The title, or the short one if there is no room for it in so many cells (``width``)."""
        return self.title if cell_len(self.title) <= width else self.short or self.title


@dataclass(frozen=True, slots=True)
class Drawing:
    """A table. ``entries``: the lines of each record; ``left_out``: titles of the columns that have no room."""

    header: Text
    entries: Sequence[Sequence[Text]]
    left_out: Sequence[str] = ()


Parts = Callable[[Any], Sequence[str]]
"""What stands in place of all columns from a certain one on, for a record that has no cells for them; else empty."""


def draw(
    columns: Sequence[Column], records: Iterable[Any], width: int, parts: Parts = lambda _: (), lead: int = 0
) -> Drawing:
    """A table with an entry for each record, never wider than the terminal if that is possible.

    Args:
        columns: The columns; columns that do not fit, or are empty, are left out.
        records: An entry each.
        width: How wide the terminal is, in cells.
        parts: What some records have instead of cells.
        lead: How many columns these have all the same.
    """
    from rich.text import Text

    records = list(records)
    parts_of = [parts(record) for record in records]
    rows = [
        [printable(column.cell(record)) if index < lead or not instead else "" for index, column in enumerate(columns)]
        for record, instead in zip(records, parts_of, strict=True)
    ]
    content = [content_width(column, map(cell_width, cells)) for column, *cells in zip(columns, *rows, strict=True)]
    widths = fit(columns, content, width)
    for index, wide in widths.items():
        fitted = columns[index].fitted
        if fitted is not None and wide < content[index]:
            for row, text in zip(rows, fitted(records, wide), strict=True):
                row[index] = printable(text) if row[index] else ""
    chosen = [(columns[index], wide) for index, wide in widths.items()]
    header = Text(
        (" " * GAP).join(cut(column.title_within(wide), wide) for column, wide in chosen).rstrip(), style="bold"
    )
    entries = []
    for row, instead in zip(rows, parts_of, strict=True):
        shown = [index for index in widths if index < lead or not instead]
        beginning = _lines([(row[index], widths[index], columns[index].wraps) for index in shown], filled=bool(instead))
        entries.append(flow(beginning[0], instead, width) if instead else beginning)
    left_out = [column.title for index, column in enumerate(columns) if content[index] and index not in widths]
    return Drawing(header, entries, left_out)


def _lines(cells: Sequence[tuple[str, int, bool]], *, filled: bool) -> list[Text]:
    """The lines of a record. ``cells``: text, width, and whether it wraps. ``filled``: up to the end of the last."""
    from rich.text import Text

    wrapped = [wrap(text, wide) if wraps else [text] for text, wide, wraps in cells]
    lines = []
    for number in range(max(map(len, wrapped), default=0)):
        line = Text(no_wrap=True)
        for texts, (_, wide, _) in zip(wrapped, cells, strict=True):
            text = texts[number] if number < len(texts) else ""
            line.append(cut(text, wide), STATE_STYLES.get(text, "")).append(" " * GAP)
        if not filled:
            line.rstrip()
        lines.append(line)
    return lines


def flow(beginning: Text, parts: Sequence[str], width: int) -> list[Text]:
    """Lines with parts that stay whole, if the terminal has room for them, beside and below a beginning.

    Args:
        beginning: The first line so far.
        parts: In order, with the punctuation between them.
        width: How wide the terminal is, in cells.
    """
    from rich.text import Text

    indent = beginning.cell_len if width - beginning.cell_len >= _LEAST_BESIDE else _INDENT
    lines, line = [], beginning
    for part in map(printable, parts):
        if line.cell_len > (0 if line is beginning else indent) and line.cell_len + cell_len(part) > width:
            line.rstrip()
            lines.append(line)
            line = Text(" " * indent, no_wrap=True)
        text = part if line.cell_len + cell_len(part) <= width else cut(part, width - line.cell_len)
        line.append(text, STATE_STYLES.get(part.rstrip(",;").rpartition(" ")[2], "")).append(" ")
    line.rstrip()
    return [*lines, line]


# --- text in so many cells --------------------------------------------------------------------------------------------


def cell_len(text: str) -> int:
    """How many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cell_width(cell: str) -> int:
    """How many cells of a terminal the text of a ``cell`` takes; 0 if it shows that there is nothing."""
    return 0 if cell in _EMPTY else cell_len(cell)


def content_width(column: Column, cells: Iterable[int]) -> int:
    """How wide a column is, with its title; 0 if it is empty and may be left out. ``cells``: how wide its cells are."""
    wide = max(cells, default=0)
    return max(wide, cell_width(column.title)) if wide or column.rank == 0 else 0


def cut(text: str, width: int) -> str:
    """A ``text``, ``width`` cells wide: filled with blanks, or ended with an ellipsis."""
    from rich.cells import set_cell_size

    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + "…"


def wrap(text: str, width: int) -> list[str]:
    """The lines of a ``text``, of at most ``width`` cells each: broken between words where that is possible."""
    from rich.console import Console
    from rich.text import Text

    # Terminals that do not know their size report 0.
    return [line.plain.strip() for line in Text(text).wrap(Console(), max(width, 1), overflow="fold")] or [""]


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Names in so many cells: those that begin alike keep what differs, and lose their common part.

    Args:
        names: The names.
        width: In cells.
    """
    from rich.cells import set_cell_size

    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if cell_len(name) > width:
            alike.setdefault(cut(name, width), []).append(name)
    shown: dict[str, str] = {}
    for beginning, members in alike.items():
        shared = common_beginning(members) if len(members) > 1 else ""
        match = _BEGINNING.match(shared)
        shared = match[0] if match else shared
        if not shared or width <= LEAST:
            shown |= dict.fromkeys(members, beginning)
            continue
        ends = [name[len(shared) :] for name in members]
        last = common_beginning([end[::-1] for end in ends])[::-1]
        for name, end in zip(members, shorten_names(_without(ends, last, width - 1), width - 1), strict=True):
            shown[name] = set_cell_size(shared, width - 1 - cell_len(end)) + "…" + end
    return [shown.get(name, name) for name in names]


def _without(ends: Sequence[str], last: str, width: int) -> list[str]:
    """Ends of names; if one is too long, without the ending that all of them have."""
    if not last or all(cell_len(end) <= width for end in ends):
        return list(ends)
    return [end.removesuffix(last) + "…" for end in ends]


def whole_ones(texts: Sequence[str], width: int) -> str:
    """As many of these texts as fit into so many cells, and how many more; at least the beginning of the first.

    Args:
        texts: The texts.
        width: In cells.
    """
    shown = ""
    for number, text in enumerate(texts):
        rest = len(texts) - number - 1
        more = f" …+{rest}" if rest else ""
        longer = f"{shown} {text}" if shown else text
        if cell_len(longer + more) <= width:
            shown = longer
        elif shown:
            return f"{shown} …+{rest + 1}"
        else:
            return text + "…" if rest and cell_len(text) < width else cut(text, width)
    return shown


# --- widths -----------------------------------------------------------------------------------------------------------


def fit(columns: Sequence[Column], content: Sequence[int], width: int) -> dict[int, int]:
    """The widths of the columns that are shown, by their index, in cells.

    Args:
        columns: The columns, from left to right.
        content: How wide the widest cell of each is, with its title; 0: it is empty, and left out.
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
    may_be_cut = [index for index in reversed(shown) if columns[index].room is not None]
    # Too wide: cells are taken from columns that may be cut, the last first; if that is not enough, all of them.
    for index in may_be_cut if left < 0 else ():
        reduction = min(max(0, -left), max(0, shown[index] - LEAST))
        shown[index] -= reduction
        left += reduction
    for index in may_be_cut if left < 0 else ():
        if left < 0 and len(shown) > 1:
            left += shown.pop(index) + GAP
    # Room is left: columns that are cut get equal parts, the last what others do not need; one that wraps, the rest.
    cut_ones = sorted(
        (index for index in shown if shown[index] < content[index]),
        key=lambda index: (columns[index].wraps, content[index] - shown[index]),
    )
    for position, index in enumerate(cut_ones if left > 0 else ()):
        others = 0 if columns[index].wraps else sum(not columns[each].wraps for each in cut_ones[position + 1 :])
        growth = min(content[index] - shown[index], left // (others + 1))
        shown[index] += growth
        left -= growth
    return shown
