"""Tables: the columns of runs and checkpoints in all lists, and how tables are printed.

On a terminal :mod:`.drawing` fits them to its width; elsewhere they are plain columns, which other programs can read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from slurmtrain.cli import formatting, output
from slurmtrain.cli.drawing import LEAST, Column, cell_len, draw, shorten_names, wrap
from slurmtrain.cli.output import LONGEST_CELL, printable, shortened
from slurmtrain.model.experiment.kinds import plain_numbers
from slurmtrain.model.query.comparison import count_states
from slurmtrain.model.query.fields import differing, flattened, is_time, shared_settings, value_of, write_value
from slurmtrain.model.query.folding import is_folded, states_of

if TYPE_CHECKING:
    from slurmtrain.cli.drawing import Drawing
    from slurmtrain.ops.submit.previews import Estimate, Preview

# Cells that a column which wraps keeps on a narrow terminal.
_LEAST_WRAPPED = 20


# --- columns of runs --------------------------------------------------------------------------------------------------

RUN_COLUMNS: Mapping[str, Column] = {
    "user": Column("USER", lambda run: run["user"], 8),
    "id": Column("ID", lambda run: run["id"]),
    "name": Column(
        "NAME",
        lambda run: run["name"],
        14,
        fitted=lambda runs, width: shorten_names([run["name"] for run in runs], width),
    ),
    "state": Column("STATE", lambda run: run["state"]),
    "params": Column("PARAMS", formatting.params_of, 12, fitted=formatting.params_within),
    "step": Column("STEP", formatting.steps),
    "progress": Column("PROGRESS", lambda run: formatting.bar(run["step"], run["total_steps"])),
    "age": Column("AGE", lambda run: formatting.age(run["submitted_at"])),
    "metrics": Column("METRICS", lambda run: formatting.metrics(run), 14),
    "eta": Column("ETA", lambda run: formatting.duration(run["eta_seconds"])),
    "rate": Column("RATE", formatting.rate),
    "checkpoint": Column("CHECKPOINT", formatting.newest_checkpoint),
    "reason": Column("REASON", formatting.reason, 18),
}
"""What lists show of runs, by name."""
LISTS: Mapping[str, tuple[str, str]] = {
    "status": ("id name state params step age metrics eta rate checkpoint reason",
               "step params reason age metrics eta rate checkpoint"),
    # By worth on a page that is watched: how far runs are, what tells them apart, when they are done.
    "top": ("id name state params step progress age eta rate metrics reason",
            "step params reason eta age progress rate metrics"),
    "wait": ("id name state params progress step eta rate metrics reason",
             "params step eta progress reason metrics rate"),
}  # fmt: skip
"""Of lists of runs: the columns in order, and those that narrow terminals leave out, the last first."""
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
# Fields that columns show anyway, though not under their names.
_SHOWN = frozenset({"id", "name", "state", "step", "reason", "submitted_at", "eta_seconds", "steps_per_second"})
# Behind these stands what a question is about.
_FIRST = 3
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
        fitted = partial(formatting.params_within, names=params)
        cell = partial(formatting.params_of, names=params)
        chosen["params"] = replace(chosen["params"], cell=cell, fitted=fitted)
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


def columns_of(
    runs: Sequence[Mapping[str, Any]], fields: Sequence[str] = (), only: Sequence[str] = (), name: str = "status"
) -> list[Column]:
    """The columns of a list of runs.

    Args:
        runs: RUN of the JSON; some may stand for sweeps.
        fields: Names of further fields that matter to who asked for the runs.
        only: The names of all fields to show; empty: the usual columns.
        name: Which of :data:`LISTS` it is.
    """
    if only:
        return [field_column(each, room=None if each in ("id", "state") else _ROOM_OF_FIELDS) for each in only]
    fields = [each for each in fields if each not in _SHOWN]
    settings = [run["params"] for run in runs if not is_folded(run)]
    columns = run_columns(*LISTS[name], [each for each in differing(settings) if f"params.{each}" not in fields])
    columns[_FIRST:_FIRST] = [field_column(each, rank=1) for each in fields]
    return [*run_columns("user", ""), *columns] if any("user" in run for run in runs) else columns


def print_runs(runs: Sequence[Mapping[str, Any]], fields: Sequence[str] = (), only: Sequence[str] = ()) -> None:
    """Print runs, with the columns that :func:`columns_of` gives ``runs``, ``fields`` and ``only``."""
    print_lines(columns_of(runs, fields, only), runs)
    settings = [run["params"] for run in runs if not is_folded(run)]
    if output.is_terminal(sys.stdout) and not only and (shared := shared_settings(settings)):
        label = "the same in all: " if len(settings) > 1 else "params: "
        output.note(label + formatting.params_within([{"params": shared}], output.width() - len(label))[0])


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
    """Runs, as many as fit on a screen, and a line that counts the other ones: a rich renderable.

    Args:
        runs: RUN of the JSON, the most important first; some may stand for sweeps.
        columns: What to show of them.
        size: The columns and lines of the screen, in cells.
        others: The states of more runs, which are counted only.
    """
    from rich.console import Group
    from rich.text import Text

    width, height = size
    drawn = _draw(columns, runs[:height], width)

    def notes(shown: int) -> list[str]:
        rest = [*(state for run in runs[shown:] for state in states_of(run)), *others]
        texts = (_describe_left_out(drawn, width), describe_others(rest) if rest else "")
        return [line for text in texts if text for line in wrap(text, width)]

    lines, shown = [drawn.header], 0
    for shown, entry in enumerate(drawn.entries, 1):
        # The last line is the cursor's.
        if shown > 1 and len(lines) + len(entry) + len(notes(shown)) >= height:
            shown -= 1
            break
        lines += entry
    return Group(*lines, *(Text(note, style="dim", no_wrap=True) for note in notes(shown)))


def describe_others(states: Sequence[str]) -> str:
    """How many more runs there are, by state."""
    return f"and {len(states)} more: {count_states(states)}"


def _describe_left_out(drawn: Drawing, width: int) -> str:
    """Which columns have something to show, and no room."""
    return f"no room in {width} columns for {', '.join(drawn.left_out)}" if drawn.left_out else ""


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
    if price := describe_estimate(preview.price):
        output.echo(price)


def describe_estimate(price: Estimate) -> str:
    """What runs may cost that are not submitted yet, in a sentence without a full stop; empty if nothing is known."""
    parts = []
    if price.at_most is not None:
        parts.append(f"at most {formatting.amount(price.at_most, price.currency)} {price.currency} per attempt")
    elif price.problem:
        parts.append(f"unknown cost: {price.problem}")
    if price.expected is not None:
        count = price.earlier_runs
        basis = f"{count} completed runs of that name" if count > 1 else "the completed run of that name"
        unit = price.unit if price.unit != price.currency else None
        expected = formatting.amount(price.expected, None if unit else price.currency)
        parts.append(f"{expected} {price.unit} at the mean cost of {basis}")
    return ", ".join(parts)


# --- drawing ----------------------------------------------------------------------------------------------------------


def print_lines(columns: Sequence[Column], records: Iterable[Any]) -> None:
    """Print a table with an entry for each record: a line, or a few for a sweep on a terminal.

    Args:
        columns: The columns; on a terminal, columns that do not fit are left out, and named below.
        records: An entry each.
    """
    if output.is_terminal(sys.stdout):
        _print_drawing(_draw(columns, records, console().width))
    else:
        print_columns(columns, records)


def _draw(columns: Sequence[Column], records: Iterable[Any], width: int) -> Drawing:
    """The entries of runs and sweeps. These have no cells from the state on, but parts beside and below one another."""
    lead = next((index for index, column in enumerate(columns) if column.title == "STATE"), 0)
    return draw(columns, records, width, formatting.sweep_parts if lead else lambda _: (), lead)


def _print_drawing(drawn: Drawing) -> None:
    from rich.text import Text

    drawer = console()
    lines = [drawn.header, *(line for entry in drawn.entries for line in entry)]
    # rich itself respects NO_COLOR. Wrapped by the terminal, if at all: nothing is cut that was meant to be whole.
    drawer.print(Text("\n").join(lines), soft_wrap=True)
    if left_out := _describe_left_out(drawn, drawer.width):
        # On a page of another program there is no standard error.
        output.echo(left_out, err=not output.is_collected())


def print_columns(columns: Sequence[Column], records: Iterable[Any]) -> None:
    """Print a table of ``records`` with all ``columns``; on a terminal, the text of the last one is wrapped."""
    print_table([column.title for column in columns], [[column.cell(each) for column in columns] for each in records])


def print_checkpoints(names: str, checkpoints: Sequence[Mapping[str, Any]]) -> None:
    """Print these columns of ``checkpoints``, CHECKPOINT of the JSON; ``names``: separated by blanks."""
    print_columns([CHECKPOINT_COLUMNS[name] for name in names.split()], checkpoints)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as :func:`print_columns`."""
    headers, *rows = [[printable(shortened(cell, LONGEST_CELL)) for cell in row] for row in (headers, *rows)]
    if output.is_terminal(sys.stdout):
        longest = max((cell_len(word) for row in rows for word in row[-1].split()), default=0)
        columns = [
            Column(title, itemgetter(index), LEAST, fitted=partial(fit_names, index))
            for index, title in enumerate(headers)
        ]
        # Only the last column is wrapped, between words where it can be.
        least = max(cell_len(headers[-1]), min(longest, _LEAST_WRAPPED))
        columns[-1] = Column(headers[-1], itemgetter(-1), least, wraps=True)
        _print_drawing(draw(columns, rows, console().width))
        return
    # All columns but the last, whose text may be long, are as wide as their widest cell.
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        output.verbatim("  ".join([*cells, line[-1]]).rstrip())


def fit_names(index: int, rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The cells of a column in so many cells, keeping what tells them apart.

    Args:
        index: Which column.
        rows: The cells of each line.
        width: In cells.
    """
    return shorten_names([row[index] for row in rows], width)


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
