"""The table of runs that ``status``, ``wait`` and ``submit --wait`` print."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.cli.shared import formatting, output, tables, times
from slurmtrain.cli.shared.fit import Column

COLUMNS = (
    Column("ID"),
    Column("NAME", room=20),
    Column("STATE"),
    Column("STEP", rank=1),
    Column("AGE", rank=2),
    Column("METRICS", rank=4, room=20),
    Column("ETA", rank=5),
    Column("RATE", rank=6),
    Column("CHECKPOINT", rank=7),
    Column("REASON", rank=3, room=24),
)
# In front of them where runs of several people are listed.
USER = Column("USER")
# Lines of a screen that the rows of a table do not get: its header, what is left out, and the cursor's.
_OTHER_LINES = 3


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print runs (RUN of the JSON), a line each: fitted to a terminal; in plain columns, with everything, elsewhere."""
    columns: Sequence[Column] = COLUMNS
    rows = [run_row(run) for run in runs]
    if any("user" in run for run in runs):
        columns, rows = (USER, *COLUMNS), [(run["user"], *row) for run, row in zip(runs, rows, strict=True)]
    if not output.is_terminal(sys.stdout):
        tables.print_table([column.header for column in columns], rows)
        return
    console = tables.console()
    console.print(tables.one_line_rows(columns, rows, console.width))


def rows_on(height: int) -> int:
    """How many runs fit on a screen of ``height`` lines, besides the other lines of :func:`screen`."""
    return max(1, height - _OTHER_LINES)


def screen(runs: Sequence[Mapping[str, Any]], width: int, others: Sequence[str]) -> Any:
    """Runs, a line each, and a line that counts those that are not shown: a rich renderable.

    Args:
        runs: RUN of the JSON, the most important first.
        width: How wide the screen is, in cells.
        others: The states of the runs that are not shown.
    """
    from rich.console import Group
    from rich.text import Text

    drawn = tables.one_line_rows(COLUMNS, [run_row(run) for run in runs], width)
    if not others:
        return drawn
    return Group(drawn, Text(count_states(others), style="dim", no_wrap=True, overflow="ellipsis"))


def count_states(states: Sequence[str]) -> str:
    """How many more runs there are, by state."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
    return f"and {len(states)} more: {counts}"


def run_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as a row of :data:`COLUMNS`."""
    return (
        run["id"],
        run["name"],
        run["state"],
        formatting.steps(run),
        formatting.age(run["submitted_at"]),
        formatting.metrics(run),
        formatting.duration(run["eta_seconds"]),
        formatting.rate(run),
        formatting.newest_checkpoint(run),
        times.localized(run["reason"] or ""),
    )
