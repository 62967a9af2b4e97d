"""The table of runs that ``status``, ``wait`` and ``submit --wait`` print."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.cli.shared import formatting, output, tables, times
from slurmtrain.cli.shared.fit import Column
from slurmtrain.model.query.differing import differing
from slurmtrain.model.query.fields import is_time, value_of

# What to show of runs, in order. PARAMS and METRICS get room for one of them: on 80 columns there is not more.
COLUMNS = (
    Column("ID"),
    Column("NAME", room=20),
    Column("STATE"),
    Column("PARAMS", rank=2, room=14),
    Column("STEP", rank=1),
    Column("AGE", rank=3),
    Column("METRICS", rank=5, room=14),
    Column("ETA", rank=6),
    Column("RATE", rank=7),
    Column("CHECKPOINT", rank=8),
    Column("REASON", rank=4, room=24),
)
# The states of all runs of a sweep.
_STATES = Column("STATE", room=16)
# In front of them where runs of several people are listed.
USER = Column("USER")
# Behind these stands what a question is about.
_FIRST = 3
# Fields that columns show anyway, though not under their names.
_SHOWN = frozenset({"id", "name", "state", "step", "reason", "submitted_at", "eta_seconds", "steps_per_second"})
# Lines of a screen that the rows of a table do not get: its header, what is left out, and the cursor's.
_OTHER_LINES = 3
# Cells of a field that somebody asked for, before it is cut.
_ROOM_OF_FIELDS = 8


def print_runs(runs: Sequence[Mapping[str, Any]], fields: Sequence[str] = ()) -> None:
    """Print runs, a line each: fitted to a terminal; in plain columns, with everything, elsewhere.

    Args:
        runs: RUN of the JSON.
        fields: Names of further fields that matter to who asked for the runs.
    """
    columns, rows = _table(runs, fields)
    if any("user" in run for run in runs):
        columns, rows = [USER, *columns], [(run["user"], *row) for run, row in zip(runs, rows, strict=True)]
    print_rows(columns, rows)


def print_fields(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print these fields of runs, a line each.

    Args:
        runs: RUN of the JSON.
        names: The names of the fields.
    """
    print_rows(*_field_table(runs, names))


def field_cell(run: Mapping[str, Any], name: str) -> str:
    """The value of the field ``name`` of a run (RUN of the JSON); times are local on a terminal, and ISO elsewhere."""
    value = value_of(run, name)
    if is_time(name) and isinstance(value, str) and output.is_terminal(sys.stdout):
        return times.calendar(value)
    return formatting.field(name, value)


def print_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, a line for each row.

    Args:
        columns: The columns; on a terminal, columns that do not fit are left out.
        rows: Their cells.
    """
    if not output.is_terminal(sys.stdout):
        tables.print_table([column.header for column in columns], rows)
        return
    console = tables.console()
    console.print(tables.one_line_rows(columns, rows, console.width))


def rows_on(height: int) -> int:
    """How many runs fit on a screen of ``height`` lines, besides the other lines of :func:`screen`."""
    return max(1, height - _OTHER_LINES)


def screen(
    runs: Sequence[Mapping[str, Any]],
    width: int,
    others: Sequence[str],
    fields: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Any:
    """Runs, a line each, and a line that counts the runs that are not shown: a rich renderable.

    Args:
        runs: RUN of the JSON, the most important first.
        width: How wide the screen is, in cells.
        others: The states of the runs that are not shown.
        fields: Names of further fields that matter to who asked for the runs.
        columns: The names of all fields to show; empty: the usual columns.
    """
    from rich.console import Group
    from rich.text import Text

    drawn = tables.one_line_rows(*(_field_table(runs, columns) if columns else _table(runs, fields)), width)
    if not others:
        return drawn
    return Group(drawn, Text(count_states(others), style="dim", no_wrap=True, overflow="ellipsis"))


def count_states(states: Sequence[str]) -> str:
    """How many more runs there are, by state."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
    return f"and {len(states)} more: {counts}"


def _table(runs: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> tuple[list[Column], list[tuple[str, ...]]]:
    """The columns of runs and their rows, with ``fields`` as further columns."""
    fields = [name for name in fields if name not in _SHOWN]
    params = [name for name in differing([run["params"] for run in runs]) if f"params.{name}" not in fields]
    further = [Column(name, rank=1) for name in fields]
    rows = [
        (*row[:_FIRST], *(field_cell(run, name) for name in fields), *row[_FIRST:])
        for run, row in zip(runs, (_run_row(run, params) for run in runs), strict=True)
    ]
    first = [_STATES if column.header == "STATE" and _has_sweeps(runs) else column for column in COLUMNS[:_FIRST]]
    return [*first, *further, *COLUMNS[_FIRST:]], rows


def _has_sweeps(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of these lines stands for all runs of a sweep."""
    return any("attempt" not in run for run in runs)


def _field_table(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[Column], list[tuple[str, ...]]]:
    columns = [Column(name, room=None if name in ("id", "state") else _ROOM_OF_FIELDS) for name in names]
    return columns, [tuple(field_cell(run, name) for name in names) for run in runs]


def _run_row(run: Mapping[str, Any], params: Sequence[str]) -> tuple[str, ...]:
    """A run as a row of :data:`COLUMNS`. ``params``: the names of parameters that differ among the runs."""
    return (
        run["id"],
        run["name"],
        run["state"],
        formatting.params(run["params"], params) or "-",
        formatting.steps(run),
        formatting.age(run["submitted_at"]),
        formatting.metrics(run),
        formatting.duration(run["eta_seconds"]),
        formatting.rate(run),
        formatting.newest_checkpoint(run),
        times.localized(run["reason"] or ""),
    )
