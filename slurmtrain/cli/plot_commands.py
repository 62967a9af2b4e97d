"""``slurmtrain plot``."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import complete, formatting, options, output, tables
from slurmtrain.cli.options import over_option
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.metrics.chart import Chart, View
    from slurmtrain.model.run.run import Run

# Where there is no terminal.
_COLUMNS, _LINES = 80, 24
# Characters of braille have two columns of dots.
_DOTS = 2
_CSV_ROWS = 10_000


@options.command("plot cnn-lr0.1 cnn-lr0.3 val_loss --log", "plot 'cnn-*' val_loss --over seed", looks=True)
@click.argument(
    "words", metavar="RUN... [METRIC]", nargs=-1, required=True, shell_complete=complete.complete_run_or_metric
)
@click.option(
    "-m", "--metric", "metrics", metavar="NAME", multiple=True, shell_complete=complete.complete_metric,
    help="A metric; repeatable. All words are runs then.",
)  # fmt: skip
@click.option(
    "--x", type=click.Choice(("step", "time")), default="step", show_default=True, help="The horizontal axis."
)
@over_option
@click.option("--log", is_flag=True, help="A logarithmic scale.")
@click.option("--all", "superseded", is_flag=True, help="Also what was trained again after an interruption.")
@click.option("--png", metavar="FILE", type=click.Path(path_type=Path), help="Write a picture instead.")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Write a picture instead.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the points as CSV.")
@options.json_option
def plot(
    workspace: Workspace, words: tuple[str, ...], metrics: tuple[str, ...], superseded: bool, as_csv: bool,
    as_json: bool, png: Path | None, svg: Path | None, over: tuple[str, ...], **shown: Any,
) -> int:  # fmt: skip
    """Draw a METRIC of each RUN over its steps, on top of each other; without a METRIC, list the metrics.

    Steps that were trained again after an interruption count once, with the values that were logged last. Dotted lines
    show where the attempts of a single run began. Values that are not a number are gaps. With --over, a line is the
    mean of runs, between their least and largest values.
    """
    from slurmtrain.errors import UserError
    from slurmtrain.ops.plot import (
        chart_of,
        chart_of_means,
        find_subject,
        means_csv,
        means_json,
        metrics_json,
        missing_metrics,
        points_csv,
        points_json,
        read_plots,
        repetitions,
    )

    if over and superseded:
        raise UserError("--all shows what single runs have trained again, and --over the means of several")
    subject = find_subject(workspace, words, metrics)
    output.warn_about(subject.observed)
    if not subject.metrics:
        output.print_json(metrics_json(subject.runs)) if as_json else _list(subject.runs)
        return 0
    plotted = read_plots(workspace, subject, keep_superseded=superseded)
    output.warn(missing_metrics(plotted, subject.metrics))
    groups = repetitions(plotted, over) if over else []

    def chart(metric: str, columns: int) -> Chart:
        view = _view(columns, **shown)
        return chart_of_means(groups, metric, view) if over else chart_of(plotted, metric, view)

    if as_json:
        output.print_json(means_json(groups, subject.metrics, over) if over else points_json(plotted))
    elif as_csv:
        _print_csv(means_csv(groups, subject.metrics) if over else points_csv(plotted))
    elif png is not None or svg is not None:
        from slurmtrain.ops.plot import COLUMNS

        _write([chart(metric, COLUMNS) for metric in subject.metrics], png, svg)
    else:
        _draw(subject.metrics, chart)
    return 0


def _view(columns: int, *, x: str, log: bool) -> View:
    from slurmtrain.model.metrics.chart import View

    return View(by_time=x == "time", log=log, columns=columns)


def _list(runs: Sequence[Run]) -> None:
    headers, rows = (
        ("ID", "NAME", "METRIC", "LAST"),
        [(run.id, run.name, name, formatting.number(value)) for run in runs for name, value in run.metrics.items()],
    )
    begin = 2 if len(runs) == 1 else 0
    tables.print_table(headers[begin:], [row[begin:] for row in rows])


def _print_csv(rows: Iterable[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows, 1):
        writer.writerow(row)
        if number % _CSV_ROWS == 0:
            output.verbatim(*text.getvalue().splitlines())
            text.seek(0)
            text.truncate()
    if text.getvalue():
        output.verbatim(*text.getvalue().splitlines())


def _write(charts: Sequence[Any], png: Path | None, svg: Path | None) -> None:
    from slurmtrain.errors import UserError
    from slurmtrain.ops.plot import write_picture

    for path, suffix in ((png, ".png"), (svg, ".svg")):
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            raise UserError(f"{path} does not end in {suffix}")
        write_picture(path, charts)
        output.verbatim(str(path))


def _draw(metrics: Sequence[str], chart_of: Callable[[str, int], Chart]) -> None:
    from slurmtrain.cli.terminal_chart import draw

    on_terminal = output.is_terminal(sys.stdout)
    width, lines = (output.width(), get_terminal_size().lines) if on_terminal else (_COLUMNS, _LINES)
    # The prompt needs a line too.
    height = (lines - 1) // len(metrics) if on_terminal else _LINES
    colour = on_terminal and not os.environ.get("NO_COLOR")
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    for metric in metrics:
        for line in draw(chart_of(metric, _DOTS * width), width, height, colour=colour, unicode=unicode):
            output.log_line("", line)
