"""Charts drawn with characters: in colour on a terminal, as plain text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slurmtrain.cli.output import printable
from slurmtrain.model.metrics.chart import Chart, tick_text, ticks

# In this order: easy to tell apart, on dark and on light terminals.
_COLOURS = ("blue+", "orange+", "green", "magenta", "cyan", "red", "blue", "green+", "magenta+", "cyan+")
# Without colours, lines are told apart by the characters that they consist of.
_CHARACTERS = "*ox+#@%&=~"
_PLAIN = str.maketrans("┌┐└┘├┤┬┴┼─│┊·", "++++++++" + "+-|:.")
# Columns between two labels of the x axis, and lines between two of the y axis.
_TICK_COLUMNS, _TICK_LINES = 12, 4
_LEAST_LINES = 8


def draw(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> list[str]:
    """The lines of a chart.

    Args:
        chart: What to draw.
        width: How many columns it may have.
        height: How many lines it may have, the legend included; fewer than eight cannot be read.
        colour: Whether it may have colours.
        unicode: Whether it may have characters outside ASCII.
    """
    legend = list(_legend(chart, width, colour=colour, unicode=unicode))
    text = _plot(chart, width, max(_LEAST_LINES, height - len(legend)), colour=colour, unicode=unicode)
    lines = [line.rstrip() for line in [*text.split("\n"), *legend] if line.strip()]
    return lines if unicode else [line.translate(_PLAIN) for line in lines]


def _plot(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    import plotext

    figure: Any = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.canvas("default")
    figure.plot_size(width, height)
    figure.title(printable(chart.title))
    figure.label(chart.x_label, "x")
    (left, right), (bottom, top) = chart.limits
    for mark in chart.marks:
        _add(figure, [(mark, bottom), (mark, top)], _marker("┊", "gray" if colour else None))
    for trace in chart.traces:
        for line in trace.faint:
            _add(figure, line, _marker("·", "gray" if colour else None), connected=False)
    for number, trace in enumerate(chart.traces):
        symbol = "braille" if unicode and (colour or len(chart.traces) == 1) else _CHARACTERS[number % len(_CHARACTERS)]
        for line in trace.lines:
            _add(figure, line, _marker(symbol, _COLOURS[number % len(_COLOURS)] if colour else None))
    _set_ruler(figure.ruler("x"), left, right, width // _TICK_COLUMNS)
    _set_ruler(figure.ruler("y"), bottom, top, height // _TICK_LINES, log=chart.log)
    text: str = figure.build().string()
    return text if colour else plotext.uncolorize(text)


def _marker(symbol: str, colour: str | None) -> Any:
    import plotext

    return plotext.marker(symbol, colour) if colour else plotext.marker(symbol)


def _add(figure: Any, line: Sequence[tuple[float, float]], marker: Any, *, connected: bool = True) -> None:
    signal = figure.signal([x for x, _ in line], [y for _, y in line], marker=marker)
    if connected:
        signal.lines()
    figure.draw(signal)


def _set_ruler(ruler: Any, low: float, high: float, most: int, *, log: bool = False) -> None:
    ruler.lim(low, high)
    places = ticks(low, high, max(2, most))
    ruler.ticks(places, [tick_text(10**place if log else place) for place in places])


def _legend(chart: Chart, width: int, *, colour: bool, unicode: bool) -> Iterator[str]:
    """A line for each run if there are several; else where its attempts began."""
    if len(chart.traces) == 1:
        if chart.marks:
            attempts = "attempt 2" if len(chart.marks) == 1 else "attempts"
            yield f"┊ {attempts} began at {chart.x_label} {', '.join(map(tick_text, chart.marks))}"[:width]
        return
    for number, trace in enumerate(chart.traces):
        label = printable(trace.label)[: width - 2]
        if not colour:
            yield f"{_CHARACTERS[number % len(_CHARACTERS)]} {label}"
            continue
        import plotext

        sign = "█" if unicode else _CHARACTERS[number % len(_CHARACTERS)]
        yield f"{plotext.colorize(sign, _COLOURS[number % len(_COLOURS)]).string()} {label}"
