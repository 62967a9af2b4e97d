"""Tables: the columns of runs and checkpoints, how many of them fit on a terminal, and how they are drawn.

On a terminal they are drawn by rich; elsewhere they are plain columns, which other programs can read.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slurmtrain.cli import formatting, output
from slurmtrain.cli.output import LONGEST_CELL, printable, shortened
from slurmtrain.model.query.fields import differing, flattened, is_time, value_of, write_value
from slurmtrain.model.written import plain_numbers

if TYPE_CHECKING:
    from slurmtrain.ops.submit.notes import Preview

STATE_STYLES = {
    "running": "cyan", "completed": "green", "failed": "red", "lost": "red", "cancelled": "yellow",
    "pending": "magenta", "unreadable": "red",
}  # fmt: skip
# Cells between two columns.
GAP = 2
# The narrowest that a column is cut to: a character and an ellipsis say nothing.
_LEAST = 4
# Cells that show that there is nothing to show.
_EMPTY = ("", "-")
# Cells that a column which wraps keeps on a narrow terminal.
_LEAST_WRAPPED = 20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``cell``: the text of a record, such as RUN of the JSON, in this column. ``room``: where a row is one line, the
    least width that makes the column worth showing if its content is wider, which is then cut, in cells; None: all of
    its content. ``rank``: columns of a lower rank get their room first; columns of rank 0 are shown on any terminal.
    """

    title: str
    cell: Callable[[Any], str] = str
    room: int | None = None
    rank: int = 0


# --- columns of runs --------------------------------------------------------------------------------------------------

RUN_COLUMNS: Mapping[str, Column] = {
    "user": Column("USER", lambda run: run["user"]),
    "id": Column("ID", lambda run: run["id"]),
    "name": Column("NAME", lambda run: run["name"], 20),
    "state": Column("STATE", lambda run: run["state"]),
    "params": Column("PARAMS", lambda run: formatting.params(run["params"]) or "-", 14),
    "step": Column("STEP", formatting.steps),
    "progress": Column("PROGRESS", lambda run: formatting.bar(run["step"], run["total_steps"])),
    "age": Column("AGE", lambda run: formatting.age(run["submitted_at"])),
    "metrics": Column("METRICS", lambda run: formatting.metrics(run), 14),
    "eta": Column("ETA", lambda run: formatting.duration(run["eta_seconds"])),
    "rate": Column("RATE", formatting.rate),
    "checkpoint": Column("CHECKPOINT", formatting.newest_checkpoint),
    "reason": Column("REASON", lambda run: formatting.localized(run["reason"] or ""), 24),
}
"""What lists show of runs, by name."""
CHECKPOINT_COLUMNS: Mapping[str, Column] = {
    "step": Column("STEP", formatting.step_saved),
    "size": Column("SIZE", lambda checkpoint: formatting.size(checkpoint["bytes"])),
    "saved": Column("SAVED", lambda checkpoint: formatting.when(checkpoint["saved_at"])),
    "seconds": Column("SECONDS", lambda checkpoint: formatting.number(checkpoint["seconds"])),
    "stall": Column("STALL", lambda checkpoint: formatting.number(checkpoint["stall_s"])),
    "format": Column("FORMAT", lambda checkpoint: checkpoint["format"] or "-"),
    "why": Column("WHY", lambda checkpoint: checkpoint["why"] or "-"),
    "files": Column("FILES", formatting.checkpoint_state),
    "kept": Column("KEPT", lambda checkpoint: checkpoint["kept"] or "-"),
    "path": Column("PATH", lambda checkpoint: checkpoint["path"]),
    "forks": Column("FORKS", lambda checkpoint: ", ".join(checkpoint["forks"]) or "-"),
}
"""What lists show of checkpoints (CHECKPOINT of the JSON), by name."""
# Of lists: the columns in order, and those that narrow terminals leave out, the last first.
_STATUS = ("id name state params step age metrics eta rate checkpoint reason",
           "step params age reason metrics eta rate checkpoint")  # fmt: skip
# Fields that columns show anyway, though not under their names.
_SHOWN = frozenset({"id", "name", "state", "step", "reason", "submitted_at", "eta_seconds", "steps_per_second"})
# Behind these stands what a question is about.
_FIRST = 3
# Lines of a screen that the rows of a table do not get: its header, what is left out, and the cursor's.
_OTHER_LINES = 3
# Cells of a field that somebody asked for, before it is cut.
_ROOM_OF_FIELDS = 8
# What CSV has of each run, before its parameters and metrics, and behind them.
_CSV_FIELDS = (
    "id", "name", "state", "cause", "reason", "sweep", "tags", "attempt", "executor", "job_id", "nodes", "submitted_at",
    "started_at", "ended_at", "step", "total_steps", "lost_steps", "goodput",
)  # fmt: skip
_CSV_LAST = ("git.commit", "git.dirty", "mlflow_run_id", "dir")


def run_columns(names: str, by_worth: str, params: Sequence[str] | None = None) -> list[Column]:
    """Columns of runs.

    Args:
        names: Their names, in order, separated by blanks.
        by_worth: The names of those that may be left out on a narrow terminal, the last first.
        params: The names of the parameters to show; None: all.
    """
    ranks = {name: rank for rank, name in enumerate(by_worth.split(), 1)}
    chosen = {name: replace(RUN_COLUMNS[name], rank=ranks.get(name, 0)) for name in names.split()}
    if params is not None and "params" in chosen:
        chosen["params"] = replace(chosen["params"], cell=lambda run: formatting.params(run["params"], params) or "-")
    return list(chosen.values())


def field_column(name: str, rank: int = 0, room: int | None = None) -> Column:
    """A column for any field of the JSON; times are local on a terminal, and ISO elsewhere.

    Args:
        name: The name of the field.
        rank: As in :class:`Column`.
        room: As there.
    """

    def cell(run: Mapping[str, Any]) -> str:
        value = value_of(run, name)
        if is_time(name) and isinstance(value, str) and output.is_terminal(sys.stdout):
            return formatting.calendar(value)
        return formatting.field(name, value)

    return Column(name, cell, room, rank)


def columns_of(runs: Sequence[Mapping[str, Any]], fields: Sequence[str] = (), only: Sequence[str] = ()) -> list[Column]:
    """The columns of a list of runs.

    Args:
        runs: RUN of the JSON.
        fields: Names of further fields that matter to who asked for the runs.
        only: The names of all fields to show; empty: the usual columns.
    """
    if only:
        return [field_column(name, room=None if name in ("id", "state") else _ROOM_OF_FIELDS) for name in only]
    fields = [name for name in fields if name not in _SHOWN]
    params = [name for name in differing([run["params"] for run in runs]) if f"params.{name}" not in fields]
    columns = run_columns(*_STATUS, params)
    # A line that stands for a sweep has the states of all its runs.
    if any("attempt" not in run for run in runs):
        columns[_FIRST - 1] = replace(columns[_FIRST - 1], room=16)
    columns[_FIRST:_FIRST] = [field_column(name, rank=1) for name in fields]
    return [*run_columns("user", ""), *columns] if any("user" in run for run in runs) else columns


def print_runs(runs: Sequence[Mapping[str, Any]], fields: Sequence[str] = (), only: Sequence[str] = ()) -> None:
    """Print runs, a line each, with the columns that :func:`columns_of` gives ``runs``, ``fields`` and ``only``."""
    print_lines(columns_of(runs, fields, only), runs)


def print_runs_csv(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print a line of names, and a line for each run, as comma-separated values.

    Args:
        runs: RUN of the JSON.
        names: The fields to print; empty: the usual ones, all parameters and all metrics.
    """
    if not names:
        users = ["user"] if any("user" in run for run in runs) else []
        inner = (
            f"{part}.{name}" for part in ("params", "metrics") for run in runs for name, _ in flattened(run[part] or {})
        )
        names = [*users, *_CSV_FIELDS, *dict.fromkeys(inner), *_CSV_LAST]
    output.print_csv([names, *([csv_cell(value_of(run, name)) for name in names] for run in runs)])


def csv_cell(value: Any) -> Any:
    """A ``value`` for programs: text as it is, nothing for null, lists separated by blanks, else JSON, not rounded."""
    if value is None or isinstance(value, str):
        return value
    # Programs may not know all forms of numbers that people write.
    value = plain_numbers(value)
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else json.dumps(value)


def screen(
    runs: Sequence[Mapping[str, Any]], columns: Sequence[Column], size: tuple[int, int], others: Sequence[str] = ()
) -> Any:
    """Runs, a line each, as many as fit on a screen, and a line that counts the other ones: a rich renderable.

    Args:
        runs: RUN of the JSON, the most important first.
        columns: What to show of them.
        size: The columns and lines of the screen, in cells.
        others: The states of more runs, which are counted only.
    """
    from rich.console import Group
    from rich.text import Text

    width, height = size
    shown = runs[: max(1, height - _OTHER_LINES)]
    drawn = drawn_lines(columns, shown, width)
    others = [*(run["state"] for run in runs[len(shown) :]), *others]
    if not others:
        return drawn
    return Group(drawn, Text(describe_others(others), style="dim", no_wrap=True, overflow="ellipsis"))


def describe_others(states: Sequence[str]) -> str:
    """How many more runs there are, by state."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
    return f"and {len(states)} more: {counts}"


def print_preview(preview: Preview) -> None:
    """Print what would be submitted: a line for each run, or for each key of a search, and the cost of all."""
    if preview.search is not None:
        print_table(["KEY", "VALUES"], [[key, str(space)] for key, space in preview.search.space.items()])
        output.echo("", preview.search.describe())
    elif preview.keys:
        rows = [
            [str(number), *(write_value(run.varies[key]) if key in run.varies else "" for key in preview.keys)]
            for number, run in enumerate(preview.runs, 1)
        ]
        print_table(["RUN", *preview.keys], rows)
        output.echo("")
    output.echo(str(preview.cost))


# --- drawing ----------------------------------------------------------------------------------------------------------


def print_lines(columns: Sequence[Column], records: Iterable[Any]) -> None:
    """Print a table with a line for each record.

    Args:
        columns: The columns; on a terminal, columns that do not fit are left out.
        records: A line each.
    """
    if output.is_terminal(sys.stdout):
        drawer = console()
        drawer.print(drawn_lines(columns, records, drawer.width))
    else:
        print_columns(columns, records)


def print_columns(columns: Sequence[Column], records: Iterable[Any]) -> None:
    """Print a table of ``records`` with all ``columns``; on a terminal, the text of the last one is wrapped."""
    print_table([column.title for column in columns], [[column.cell(each) for column in columns] for each in records])


def print_checkpoints(names: str, checkpoints: Sequence[Mapping[str, Any]]) -> None:
    """Print these columns of ``checkpoints``, CHECKPOINT of the JSON; ``names``: separated by blanks."""
    print_columns([CHECKPOINT_COLUMNS[name] for name in names.split()], checkpoints)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as :func:`print_columns`."""
    if output.is_terminal(sys.stdout):
        from rich.cells import cell_len

        drawer = console()
        lines = [headers, *([printable(shortened(cell, LONGEST_CELL)) for cell in row] for row in rows)]
        content = [max(cell_len(line[index]) for line in lines) for index in range(len(headers))]
        longest_word = max(cell_len(word) for line in lines for word in line[-1].split() or [""])
        *cut, last = fit_wrapped(content, min(longest_word, _LEAST_WRAPPED), drawer.width)
        # rich itself respects NO_COLOR. Only the last column is wrapped, between words where it can be.
        drawn = _empty_table(zip(headers, cut, strict=False))
        drawn.add_column(headers[-1], width=last, overflow="fold")
        for line in lines[1:]:
            drawn.add_row(*map(_styled, line))
        drawer.print(drawn)
        return
    headers, *rows = [[printable(shortened(cell, LONGEST_CELL)) for cell in row] for row in (headers, *rows)]
    # All columns but the last, whose text may be long, are as wide as their widest cell.
    widths = [max(len(line[column]) for line in [headers, *rows]) for column in range(len(headers) - 1)]
    for line in [headers, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        output.verbatim("  ".join([*cells, line[-1]]).rstrip())


def print_network(network: Mapping[str, Any] | None) -> None:
    """Print each ``network`` that an attempt could have used, and the addresses that were left out, and why."""
    from slurmtrain.cli import describe

    if rows := describe.network_rows(network):
        output.echo()
        print_table(describe.NETWORK_HEADERS, rows)
        for line in describe.excluded_addresses(network):
            output.paragraph(f"left out: {line}", "  ")


def console(*, stderr: bool = False) -> Any:
    """Where rich draws: the terminal of standard output, or of standard error."""
    from rich.console import Console

    if output.is_collected():
        return Console(file=output.stdout(), width=output.width(), force_terminal=True)
    # By itself it follows changes of the terminal's width.
    return Console(stderr=stderr, width=output.width() if output.is_too_narrow() else None)


def drawn_lines(columns: Sequence[Column], records: Iterable[Any], width: int) -> Any:
    """A rich table with a line for each record, never wider than the terminal.

    Args:
        columns: The columns; columns that do not fit, or are empty, are left out.
        records: A line each.
        width: How wide the terminal is, in cells.
    """
    rows = [[printable(column.cell(record)) for column in columns] for record in records]
    content = [content_width(column, map(cell_width, cells)) for column, *cells in zip(columns, *rows, strict=True)]
    widths = fit(columns, content, width)
    drawn = _empty_table((columns[index].title, wide) for index, wide in widths.items())
    for row in rows:
        drawn.add_row(*(_styled(row[index]) for index in widths))
    return drawn


def cell_width(cell: str) -> int:
    """How many cells of a terminal the text of a ``cell`` takes; 0 if it shows that there is nothing."""
    from rich.cells import cell_len

    return 0 if cell in _EMPTY else cell_len(cell)


def content_width(column: Column, cells: Iterable[int]) -> int:
    """How wide a column is, with its title; 0 if it is empty and may be left out. ``cells``: how wide its cells are."""
    wide = max(cells, default=0)
    return max(wide, cell_width(column.title)) if wide or column.rank == 0 else 0


def _empty_table(columns: Iterable[tuple[str, int]]) -> Any:
    """A table without lines, which leaves the width to its cells. ``columns``: those that are cut, and their widths."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title, width in columns:
        table.add_column(title, width=width, no_wrap=True, overflow="ellipsis")
    return table


def _styled(cell: str) -> Any:
    from rich.text import Text

    return Text(printable(cell), style=STATE_STYLES.get(cell, ""))


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
    # Too wide: cells are taken from columns that may be cut, the last first, as far as that goes.
    for index in reversed(shown):
        if left < 0 and columns[index].room is not None:
            reduction = min(-left, max(0, shown[index] - _LEAST))
            shown[index] -= reduction
            left += reduction
    # Room is left: columns that are cut get equal parts, the last what the others do not need.
    cut = sorted((index for index in shown if shown[index] < content[index]), key=lambda i: content[i] - shown[i])
    for position, index in enumerate(cut if left > 0 else ()):
        growth = min(content[index] - shown[index], left // (len(cut) - position))
        shown[index] += growth
        left -= growth
    return shown


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


# --- progress ---------------------------------------------------------------------------------------------------------

# Fewer bytes than this are read before a user would suspect a hang.
_LARGE_BYTES = 1 << 30
ShowCount = Callable[[int, int], None]
"""A callback that takes how many are done, or how many bytes, and the total."""


@contextmanager
def byte_progress() -> Iterator[ShowCount]:
    """Yield a callback that shows the progress of reading large files: a bar, on a terminal only."""
    if not output.is_terminal(sys.stderr):
        yield lambda _read, _total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda read, total: progress.update(task, completed=read, total=total, visible=total >= _LARGE_BYTES)


@contextmanager
def count_progress(unit: str) -> Iterator[ShowCount]:
    """Yield a callback that shows how many of a known number are done: a bar, on a terminal only.

    Args:
        unit: What is counted, in the plural.
    """
    if not output.is_terminal(sys.stderr):
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
