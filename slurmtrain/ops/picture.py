"""Charts as pictures: PNG and SVG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import UserError
from slurmtrain.model.metrics.chart import Chart, tick_text
from slurmtrain.system.files import describe_os_error

# Inches, and dots per inch of a PNG.
_WIDTH, _HEIGHT, _DPI = 8.0, 4.5, 150
COLUMNS = 2000
"""More columns than this cannot be told apart in a picture."""


def write_picture(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts, one below the other, to a file whose suffix names its format: ``.png`` or ``.svg``.

    An existing file is replaced.

    Raises:
        UserError: The file cannot be written.
    """
    content = _picture(charts, path.suffix.lower().removeprefix("."))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_os_error(error)}") from error


def _picture(charts: Sequence[Chart], suffix: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.BytesIO()
    # Text stays text in an SVG, and the same chart gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "slurmtrain"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(charts)), layout="constrained")
        for number, chart in enumerate(charts):
            _draw(chart, figure.add_subplot(len(charts), 1, number + 1))
        figure.savefig(file, format=suffix, dpi=_DPI, metadata={"Date": None} if suffix == "svg" else None)
    return file.getvalue()


def _draw(chart: Chart, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for number, trace in enumerate(chart.traces):
        colour = f"C{number % 10}"
        for line in trace.faint:
            axes.plot(*zip(*line, strict=True), color=colour, alpha=0.3)
        for index, line in enumerate(trace.lines):
            # A single point between gaps makes no line.
            marker = "o" if len(line) == 1 else None
            label = _plain(trace.label) if not index else None
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=label)
    for mark in chart.marks:
        axes.axvline(mark, color="grey", linestyle=":")
    axes.set_title(_plain(chart.title))
    axes.set_xlabel(chart.x_label)
    if chart.log:
        axes.yaxis.set_major_formatter(lambda value, _position: tick_text(10**value))
    if len(chart.traces) > 1:
        axes.legend()


def _plain(text: str) -> str:
    """A text without formulas, which matplotlib finds between dollar signs, and without characters that XML forbids.

    A label that begins with an underscore would be left out of the legend.
    """
    visible = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return visible.replace("$", r"\$").replace("_", "\N{ZERO WIDTH SPACE}_", text.startswith("_"))
