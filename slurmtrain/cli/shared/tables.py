"""Tables: drawn on a terminal; elsewhere plain columns, which other programs can read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from slurmtrain.cli.shared import output
from slurmtrain.cli.shared.fit import GAP, Column, fit, fit_wrapped
from slurmtrain.cli.shared.printable import LONGEST_CELL, printable, shortened

STATE_STYLES = {
    "running": "cyan", "completed": "green", "failed": "red", "lost": "red", "cancelled": "yellow",
    "pending": "magenta", "unreadable": "red",
}  # fmt: skip
# Cells that show that there is nothing to show.
_EMPTY = ("", "-")
# Cells that a column which wraps keeps on a narrow terminal.
_LEAST_WRAPPED = 20


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich on a terminal, in plain columns elsewhere."""
    if output.is_terminal(sys.stdout):
        drawer = console()
        drawer.print(_wrapped_rows(headers, rows, drawer.width))
        return
    headers, *rows = [[printable(shortened(cell, LONGEST_CELL)) for cell in row] for row in (headers, *rows)]
    # All columns but the last, whose text may be long, are as wide as their widest cell.
    widths = [max(len(line[column]) for line in [headers, *rows]) for column in range(len(headers) - 1)]
    for line in [headers, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        output.verbatim("  ".join([*cells, line[-1]]).rstrip())


def console(*, stderr: bool = False) -> Any:
    """Where rich draws: the terminal of standard output, or of standard error."""
    from rich.console import Console

    if output.is_collected():
        return Console(file=output.stdout(), width=output.width(), force_terminal=True)
    # By itself it follows changes of the terminal's width.
    return Console(stderr=stderr, width=output.width() if output.is_too_narrow() else None)


def _wrapped_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Any:
    """A rich table; rich itself respects NO_COLOR. Only the last column is wrapped, between words where it can be."""
    from rich.cells import cell_len

    lines = [headers, *([printable(shortened(cell, LONGEST_CELL)) for cell in row] for row in rows)]
    content = [max(cell_len(line[index]) for line in lines) for index in range(len(headers))]
    longest_word = max(cell_len(word) for line in lines for word in line[-1].split() or [""])
    *cut, last = fit_wrapped(content, min(longest_word, _LEAST_WRAPPED), width)
    drawn = _table()
    for header, wide in zip(headers, cut, strict=False):
        drawn.add_column(header, width=wide, no_wrap=True, overflow="ellipsis")
    drawn.add_column(headers[-1], width=last, overflow="fold")
    for line in lines[1:]:
        drawn.add_row(*map(_styled, line))
    return drawn


def one_line_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Any:
    """A rich table with one line for each row, never wider than the terminal.

    Args:
        columns: The columns; columns that do not fit, or are empty, are left out.
        rows: The cells.
        width: How wide the terminal is, in cells.
    """
    from rich.cells import cell_len

    rows = [[printable(cell) for cell in row] for row in rows]
    content = [max((cell_len(row[i]) for row in rows if row[i] not in _EMPTY), default=0) for i in range(len(columns))]
    content = [
        max(wide, cell_len(column.header)) if wide or column.rank == 0 else 0
        for column, wide in zip(columns, content, strict=True)
    ]
    widths = fit(columns, content, width)
    drawn = _table()
    for index, wide in widths.items():
        drawn.add_column(columns[index].header, width=wide, no_wrap=True, overflow="ellipsis")
    for row in rows:
        drawn.add_row(*(_styled(row[index]) for index in widths))
    return drawn


def _table() -> Any:
    """An empty table without lines, which leaves the width to its cells."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")


def _styled(cell: str) -> Any:
    from rich.text import Text

    return Text(printable(cell), style=STATE_STYLES.get(cell, ""))
