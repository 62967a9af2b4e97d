"""Tables: drawn on a terminal; elsewhere plain columns, which other programs can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from slurmtrain.cli.shared import formatting

RUN_HEADERS = ("ID", "NAME", "STATE", "STEP", "RATE", "ETA", "METRICS", "CHECKPOINT", "REASON")
_STYLES = {
    "running": "cyan", "completed": "green", "failed": "red", "lost": "red", "cancelled": "yellow",
    "pending": "magenta",
}  # fmt: skip


def run_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run (RUN of the JSON) as a row under :data:`RUN_HEADERS`."""
    return (
        run["id"],
        run["name"],
        run["state"],
        formatting.steps(run),
        formatting.rate(run),
        formatting.duration(run["eta_seconds"]),
        formatting.metrics(run),
        formatting.newest_checkpoint(run),
        run["reason"] or "",
    )


def is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that can draw tables."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich on a terminal, in plain columns elsewhere."""
    if is_terminal(sys.stdout):
        from rich.console import Console

        Console().print(rich_table(headers, rows))
        return
    # All columns but the last, whose text may be long, are as wide as their widest cell.
    widths = [max(len(line[column]) for line in [headers, *rows]) for column in range(len(headers) - 1)]
    for line in [headers, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())


def rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A rich table; rich itself respects NO_COLOR."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for line in rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    return drawn
