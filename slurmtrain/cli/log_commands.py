"""What runs print and log: ``logs``, ``plot``, with characters on a terminal, and ``ui``, which is MLflow's."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.metrics.chart import Chart
    from slurmtrain.ops.ui import Show


@options.command("logs @last -f", "logs digits -n 50 --rank 0", looks=True)
@options.run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run has ended; exit with its outcome.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log.")
@click.option(
    "--since", metavar="WHEN",
    help="Only lines written since 10m ago or 2026-11-22T10:30, of all attempts; accurate to half a minute.",
)  # fmt: skip
@click.option("--grep", metavar="REGEX", help="Only lines that contain a match of this regular expression.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--attempt", type=click.IntRange(min=1), help="Only this attempt; by default the newest.")
@click.option("--paths", is_flag=True, help="Print the paths of the logs instead.")
def logs_command(
    workspace: Workspace, run: str, follow: bool, lines: int | None, since: str | None, grep: str | None,
    rank: int | None, attempt: int | None, paths: bool,
) -> int:  # fmt: skip
    """Print the output of the ranks of RUN. Each line begins with its attempt and rank, unless --rank selects one."""
    from slurmtrain.errors import UserError
    from slurmtrain.model.query.fields import read_span
    from slurmtrain.ops.logs import Choice, log_paths, read_logs
    from slurmtrain.ops.shared.find import find

    try:
        pattern = None if grep is None else re.compile(grep)
        begin = None if since is None else read_span(since, time.time()).begin
    except re.error as error:
        raise UserError(f"--grep {grep!r} is not a regular expression: {error}") from error
    except ValueError as error:
        raise UserError(f"--since: {error}") from error
    choice = Choice(rank=rank, attempt=attempt, newest=lines, pattern=pattern, since=begin)
    [run_id], _ = find(workspace, [run], ask_slurm=False)
    if paths:
        output.verbatim(*map(str, log_paths(workspace, run_id, choice)))
        return 0
    for line in read_logs(
        workspace,
        run_id,
        choice,
        follow=follow,
        waits=lambda reason: output.warn([f"run {run_id} is waiting: {reason}"]),
    ):
        output.log_line("" if rank is not None else f"[{line.attempt}/{line.origin}] ", line.text)
    if not follow:
        return 0
    # Read again: when the logs have ended, so has the run, and its state decides the exit code.
    _, observed = find(workspace, [run_id], ask_slurm=False)
    return 0 if observed.runs[run_id].state == "completed" else 1


# --- plot -------------------------------------------------------------------------------------------------------------

# Where there is no terminal.
_COLUMNS, _LINES = 80, 24
# Characters of braille have two columns of dots.
_DOTS = 2


@options.command("plot cnn-lr0.1 cnn-lr0.3 val_loss --log", "plot 'cnn-*' val_loss --over seed", looks=True)
@click.argument(
    "words", metavar="RUN... [METRIC]", nargs=-1, required=True, shell_complete=options.complete_run_or_metric
)
@click.option(
    "-m", "--metric", "metrics", metavar="NAME", multiple=True, shell_complete=options.complete_metric,
    help="A metric; repeatable. Then all other words are runs.",
)  # fmt: skip
@click.option(
    "--x", type=click.Choice(("step", "time")), default="step", show_default=True, help="The horizontal axis."
)
@options.over_option
@click.option("--log", is_flag=True, help="A logarithmic scale.")
@click.option(
    "--all", "superseded", is_flag=True, help="Also draw steps that were trained again after an interruption."
)
@click.option("--png", metavar="FILE", type=click.Path(path_type=Path), help="Write a picture instead.")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Write a picture instead.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the points as CSV.")
@options.json_option
def plot_command(
    workspace: Workspace, words: tuple[str, ...], metrics: tuple[str, ...], superseded: bool, as_csv: bool,
    as_json: bool, png: Path | None, svg: Path | None, over: tuple[str, ...], x: str, log: bool,
) -> int:  # fmt: skip
    """Draw a METRIC of each RUN over its steps, in one chart; without a METRIC, list the metrics.

    Steps that were trained again after an interruption count once, with the values that were logged last. Dotted lines
    show where the attempts of a single run began. Values that are not a number are gaps. With --over, each line is the
    mean of several runs, between their least and largest values.
    """
    from slurmtrain.errors import UserError
    from slurmtrain.model.metrics.chart import View
    from slurmtrain.ops import plot

    if over and superseded:
        raise UserError(
            "--all and --over exclude each other: --all shows what single runs trained again, --over the "
            "means of several"
        )
    subject = plot.find_subject(workspace, words, metrics)
    output.warn_about(subject.observed)
    if not subject.metrics and as_json:
        output.print_json(plot.metrics_json(subject.runs))
        return 0
    if not subject.metrics:
        cells = [
            (run.id, run.name, name, formatting.number(value))
            for run in subject.runs
            for name, value in run.metrics.items()
        ]
        # Of a single run everybody knows the id and the name.
        begin = 2 if len(subject.runs) == 1 else 0
        tables.print_table(("ID", "NAME", "METRIC", "LAST")[begin:], [row[begin:] for row in cells])
        return 0
    plotted = plot.read_plots(workspace, subject, keep_superseded=superseded)
    output.warn(plot.missing_metrics(plotted, subject.metrics))
    groups = plot.repetitions(plotted, over) if over else []

    def charts(columns: int) -> Iterator[Chart]:
        view = View(by_time=x == "time", log=log, columns=columns)
        for metric in subject.metrics:
            yield plot.chart_of_means(groups, metric, view) if over else plot.chart_of(plotted, metric, view)

    if as_json:
        output.print_json(plot.means_json(groups, subject.metrics, over) if over else plot.points_json(plotted))
    elif as_csv:
        rows = plot.means_csv(groups, subject.metrics) if over else plot.points_csv(plotted)
        output.print_csv(rows, line_end="\n")
    elif png is not None or svg is not None:
        for path, suffix in ((png, ".png"), (svg, ".svg")):
            if path is not None:
                if path.suffix.lower() != suffix:
                    raise UserError(f"{path} does not end in {suffix}")
                plot.write_picture(path, list(charts(plot.COLUMNS)))
                output.verbatim(str(path))
    else:
        draw_charts(charts, len(subject.metrics))
    return 0


def draw_charts(charts: Callable[[int], Iterable[Chart]], count: int) -> None:
    """Draw charts below each other.

    Args:
        charts: They are made for a number of columns.
        count: How many there are.
    """
    on_terminal = output.is_terminal(sys.stdout)
    width, lines = (output.width(), get_terminal_size().lines) if on_terminal else (_COLUMNS, _LINES)
    # The prompt needs a line too.
    height = (lines - 1) // count if on_terminal else _LINES
    colour = on_terminal and not os.environ.get("NO_COLOR")
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    for chart in charts(_DOTS * width):
        for line in draw(chart, width, height, colour=colour, unicode=unicode):
            output.log_line("", line)


# In this order: easy to tell apart, on dark and on light terminals.
_COLOURS = ("blue+", "orange+", "green", "magenta", "cyan", "red", "blue", "green+", "magenta+", "cyan+")
# Without colours, lines are told apart by the characters that they consist of.
_CHARACTERS = "*ox+#@%&=~"
_PLAIN = str.maketrans("┌┐└┘├┤┬┴┼─│┊·", "++++++++" + "+-|:.")
# Columns between two labels of the x axis, and lines between two of the y axis.
_TICK_COLUMNS, _TICK_LINES = 12, 4
_LEAST_LINES = 8


def draw(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> list[str]:
    """The lines of a chart: in colour on a terminal, as plain text elsewhere.

    Args:
        chart: What to draw.
        width: How many columns it may have.
        height: How many lines it may have, the legend included; fewer than eight cannot be read.
        colour: Whether it may have colours.
        unicode: Whether it may have characters outside ASCII.
    """
    import plotext

    from slurmtrain.model.metrics.chart import tick_text, ticks

    legend = list(_chart_legend(chart, width, colour=colour, unicode=unicode))
    if len(legend) > (most := max(_LEAST_LINES, height // 2)):
        more = f"and {len(legend) - most + 1} more; --over PARAM draws their means, --csv has all"
        legend = [*legend[: most - 1], more[:width]]
    height = max(_LEAST_LINES, height - len(legend))
    # plotext has one figure for the whole process: the chart before this one is still in it.
    figure: Any = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.canvas("default")
    figure.plot_size(width, height)
    figure.title(output.printable(chart.title))
    figure.label(chart.x_label, "x")

    def add(points: Sequence[tuple[float, float]], symbol: str, shade: str, *, connected: bool = True) -> None:
        marker = plotext.marker(symbol, shade) if colour else plotext.marker(symbol)
        signal = figure.signal([x for x, _ in points], [y for _, y in points], marker=marker)
        if connected:
            signal.lines()
        figure.draw(signal)

    (left, right), (bottom, top) = chart.limits
    # Marks and faint points come first, since what is drawn later covers them.
    for mark in chart.marks:
        add([(mark, bottom), (mark, top)], "┊", "gray")
    for trace in chart.traces:
        for line in trace.faint:
            add(line, "·", "gray", connected=False)
    for number, trace in enumerate(chart.traces):
        symbol = "braille" if unicode and (colour or len(chart.traces) == 1) else _CHARACTERS[number % len(_CHARACTERS)]
        for line in trace.lines:
            add(line, symbol, _COLOURS[number % len(_COLOURS)])
    for axis, low, high, most in (
        ("x", left, right, width // _TICK_COLUMNS),
        ("y", bottom, top, height // _TICK_LINES),
    ):
        ruler, places = figure.ruler(axis), ticks(low, high, max(2, most))
        ruler.lim(low, high)
        ruler.ticks(places, [tick_text(10**place if axis == "y" and chart.log else place) for place in places])
    text: str = figure.build().string()
    drawn = (text if colour else plotext.uncolorize(text)).split("\n")
    lines = [line.rstrip() for line in [*drawn, *legend] if line.strip()]
    return lines if unicode else [line.translate(_PLAIN) for line in lines]


def _chart_legend(chart: Chart, width: int, *, colour: bool, unicode: bool) -> Iterator[str]:
    """A line for each run if there are several; else where its attempts began."""
    from slurmtrain.model.metrics.chart import tick_text

    if len(chart.traces) == 1:
        if chart.marks:
            attempts = "attempt 2" if len(chart.marks) == 1 else "attempts"
            yield f"┊ {attempts} began at {chart.x_label} {', '.join(map(tick_text, chart.marks))}"[:width]
        return
    for number, trace in enumerate(chart.traces):
        label = output.printable(trace.label)[: width - 2]
        if not colour:
            yield f"{_CHARACTERS[number % len(_CHARACTERS)]} {label}"
            continue
        import plotext

        sign = "█" if unicode else _CHARACTERS[number % len(_CHARACTERS)]
        yield f"{plotext.colorize(sign, _COLOURS[number % len(_COLOURS)]).string()} {label}"


# --- ui ---------------------------------------------------------------------------------------------------------------


@options.command("ui", "ui 'lr-*'")
@options.maybe_run_argument
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", default=5000, show_default=True,
    help="The server's port; if it is in use, the next free one.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that the server listens on.")
@click.option("--no-browser", "quiet", is_flag=True, help="Only print the address.")
@options.json_option
def ui_command(workspace: Workspace, run: str | None, port: int, host: str, quiet: bool, as_json: bool) -> int:
    """Show the curves of runs in MLflow until Ctrl-C: start its server for their store, and send what is new.

    RUN is shown on its own page; a sweep, by its id or its name, or a pattern in quotes, as the curves of its runs;
    without one, the experiment of the newest run. These runs are sent first, and all others while the page is open; the
    curves of runs that train go on growing. If the store is a server that runs already, this ends once everything is
    sent.

    On this machine, and through a tunnel to it, only your own account is served.
    """
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.ui import choose_shown, displaying
    from slurmtrain.system.local_pages import is_loopback, tunnel
    from slurmtrain.system.process import StopSignal

    if not is_loopback(host):
        output.warn([f"anybody who can connect to {host} can read and change everything in the store"])
    observed = observe(workspace, ask_slurm=False)
    output.warn_about(observed)
    shown = choose_shown(workspace, observed, run)

    def occupied(unavailable: int, next_free: int) -> None:
        output.echo(f"port {unavailable} is not available; using {next_free} instead", err=True)

    @contextlib.contextmanager
    def showing_progress() -> Iterator[Show]:
        with tables.count_progress("runs sent") as count:

            def show(sent: int, total: int, problems: Sequence[str]) -> None:
                if total:
                    count(sent, total)
                output.warn(problems)

            yield show

    with StopSignal() as stop, displaying(workspace, shown, host, port, occupied) as display:
        with showing_progress() as show:
            address = display.address(stop, show)
        if not address:
            return 0
        _present_page(shown.store, address, as_json=as_json, opens=not quiet)
        if display.server is not None:
            if line := tunnel(os.environ, display.server.host, display.server.port):
                output.echo(f"to open this address on your own machine, run there: {line}", err=True)
            output.echo("attempts, interruptions and checkpoints: 'slurmtrain serve' and 'slurmtrain report'", err=True)
            output.echo("Ctrl-C ends it", err=True)
        with showing_progress() as show:
            sent = display.follow(stop, show, forever=False)
        if sent:
            output.echo(f"{sent} {'run was' if sent == 1 else 'runs were'} sent", err=True)
        if display.server is not None:
            display.follow(stop, lambda _sent, _total, problems: output.warn(problems), forever=True)
    return 0


def _present_page(store: str, address: str, *, as_json: bool, opens: bool) -> None:
    """Print the address of a page, and open it if there is a screen to open it on."""
    from slurmtrain.system.local_pages import has_browser

    if as_json:
        output.print_json({"schema": 1, "url": address, "store": store}, on_a_line=True)
    else:
        output.echo(address)
    if opens and has_browser(os.environ):
        import webbrowser

        webbrowser.open(address)
