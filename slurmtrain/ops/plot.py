"""Plotting metrics of runs: which runs and metrics are meant, their points, why there are none, and pictures."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, RunNotFound, SlurmtrainError, UserError
from slurmtrain.history import History, read_history
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.metrics.chart import Chart, Series, View, make_chart, tick_text
from slurmtrain.model.metrics.curves import Curve, MeanCurve, Points, mean_curve
from slurmtrain.model.query.fields import differing, iso, repetition_key, write_settings
from slurmtrain.model.query.measures import check_field
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.find import choose_all, find_all
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import Observed, check_readable
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error

# Inches, and dots per inch of a PNG.
_WIDTH, _HEIGHT, _DPI = 8.0, 4.5, 150
COLUMNS = 2000
"""More columns than this cannot be told apart in a picture."""
# How many metrics, or runs, a message names.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Plotted:
    """A run whose metrics are plotted."""

    run: Run
    history: History

    def since(self, metric: str) -> float:
        """When the run first started; if that is unknown, when it logged a ``metric`` first."""
        kept = self.history.curves[metric].kept
        first = kept.times[0] if len(kept) else 0.0
        return self.run.started_at if self.run.started_at is not None else first


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be plotted: ``runs``, and names of ``metrics``, none if they are to be listed."""

    runs: Sequence[Run]
    metrics: Sequence[str]
    observed: Observed


def find_subject(workspace: Workspace, words: Sequence[str], metrics: Sequence[str]) -> Subject:
    """What a user means.

    Args:
        workspace: Where the runs are.
        words: Runs, and behind them the metric unless ``metrics`` are given.
        metrics: Names of metrics.

    Raises:
        RunNotFound: No run is called that.
        UserError: No run has logged such a metric.
        SlurmtrainError: The runs have logged nothing yet.
    """
    words, last = (words, None) if metrics or len(words) == 1 else (words[:-1], words[-1])
    ids, observed = find_all(workspace, words)
    names = _metric_names(workspace, ids)
    if last is not None and last not in names:
        with contextlib.suppress(RunNotFound):
            # Two runs without a metric: theirs are listed.
            ids, last = list(dict.fromkeys([*ids, *choose_all(workspace, observed.runs, [last])])), None
            names = _metric_names(workspace, ids)
    loaded = workspace.store.load_all(ids)
    runs = [loaded[run_id] for run_id in ids]
    for run in runs:
        check_readable(run)
    if not names:
        reasons = [_why_nothing(workspace, run) for run in runs[:_LISTED]]
        more = f"; nor have {len(runs) - _LISTED} more runs" if len(runs) > _LISTED else ""
        raise SlurmtrainError("; ".join(reasons) + more)
    chosen = list(metrics) if last is None else [last]
    for name in chosen:
        if name not in names:
            raise UserError(describe_unknown(name, names))
    return Subject(runs, chosen, observed)


def _metric_names(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """The names of the metrics that these runs have logged."""
    runs = workspace.store.load_all(run_ids)
    return list(dict.fromkeys(name for run_id in run_ids for name in runs[run_id].metrics))


def describe_unknown(name: str, names: Sequence[str]) -> str:
    """That there is no metric of this ``name``, and which ``names`` there are, as a sentence without a full stop."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"there is no metric {name!r}{suggestion(name, names)}; there are {', '.join(names[:_LISTED])}{more}"


def _why_nothing(workspace: Workspace, run: Run) -> str:
    """Why a run has no metrics, as a sentence without a full stop."""
    begin = f"run {run.id} has logged no metric" + ("" if run.ended else " yet")
    if not run.ended and run.state != "running":
        return f"{begin}: it is {run.state}" + (f" ({run.reason})" if run.reason else "")
    if run.reason and run.state != "completed":
        return f"{begin}: {run.reason}"
    with contextlib.suppress(PathError):
        reads = current_plan(workspace.root.run(run.id), run).spec.tracking.metrics
        if reads is not None and not reads.is_off:
            where = f"the pattern {reads.pattern!r}" if reads.pattern is not None else f"the file {reads.file}"
            return f"{begin}: nothing was found for {where} of tracking.metrics"
    return f"{begin}: docs/scripts.md says how to log some"


def read_plots(workspace: Workspace, subject: Subject, *, keep_superseded: bool) -> list[Plotted]:
    """The histories of the runs of a ``subject`` in a ``workspace``.

    ``keep_superseded``: with what was rolled back. Raises RunUnreadable.
    """
    return [
        Plotted(run, read_history(run, workspace.root.run(run.id), subject.metrics, keep_superseded=keep_superseded))
        for run in subject.runs
    ]


def chart_of(plotted: Sequence[Plotted], metric: str, view: View) -> Chart:
    """The chart of a ``metric`` in this ``view``, with the ``plotted`` runs that have it."""
    having = [each for each in plotted if metric in each.history.curves]
    # Each run is told from the others by its name and params where they differ, and by its id where these do not.
    names = differing([each.run.params for each in having])
    has_names = len({each.run.name for each in having}) > 1 or not names
    labels = [_label(each.run, names, has_name=has_names) for each in having]
    series = []
    for each, label in zip(having, labels, strict=True):
        curve = each.history.curves[metric]
        begun: dict[int, int] = {}
        for attempt, step in zip(curve.kept.attempts, curve.kept.steps, strict=True):
            begun.setdefault(attempt, step)
        starts = [(start.first_step or begun.get(start.number), start.started_at) for start in each.run.attempts[1:]]
        unique = label if labels.count(label) == 1 else f"{label} {each.run.id}"
        series.append(Series(unique, curve, each.since(metric), starts))
    return make_chart(metric, series, view)


def _label(run: Run, params: Sequence[str], *, has_name: bool) -> str:
    return " ".join(filter(None, [run.name * has_name, write_settings(run.params, params) if params else ""]))


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Runs that differ only in some params. ``label``: what tells them from others."""

    plotted: Sequence[Plotted]
    label: str

    def mean(self, metric: str) -> MeanCurve:
        """The mean of a ``metric`` over the runs that have it."""
        having = [each for each in self.plotted if metric in each.history.curves]
        return mean_curve([(each.history.curves[metric].kept, each.since(metric)) for each in having])


def repetitions(plotted: Sequence[Plotted], over: Sequence[str]) -> list[Repetitions]:
    """The runs that are equal but for some params, together.

    Args:
        plotted: The runs.
        over: The params that may differ, with ``params.``.

    Raises:
        QueryError: No run has such a param.
    """
    for name in over:
        check_field(name, [{"params": dict(each.run.params), "metrics": {}} for each in plotted])
    repeated = {name.removeprefix("params.") for name in over}
    shared = [name for name in differing([each.run.params for each in plotted]) if name not in repeated]
    groups: dict[tuple[Any, ...], list[Plotted]] = {}
    for each in plotted:
        groups.setdefault((each.run.name, *repetition_key(each.run.params, shared)), []).append(each)
    has_names = len({each.run.name for each in plotted}) > 1 or not shared
    return [
        Repetitions(runs, f"{_label(runs[0].run, shared, has_name=has_names)} (mean of {len(runs)})")
        for runs in groups.values()
    ]


def chart_of_means(groups: Sequence[Repetitions], metric: str, view: View) -> Chart:
    """The chart of the means of a ``metric`` over ``groups`` of runs, in this ``view``, between their bounds."""
    series = []
    for group in groups:
        curve = group.mean(metric)
        if curve.counts:
            series.append(Series(group.label, Curve(curve.means), 0.0, bounds=[curve.lows, curve.highs]))
    return make_chart(f"mean {metric}", series, view)


def means_json(groups: Sequence[Repetitions], metrics: Sequence[str], over: Sequence[str]) -> dict[str, Any]:
    """What ``plot --over --json`` prints.

    Args:
        groups: Runs that repeat each other.
        metrics: The names of the metrics.
        over: The params that may differ between runs of a group, with ``params.``.
    """
    as_json = []
    for group in groups:
        columns = {}
        for name in metrics:
            curve = group.mean(name)
            columns[name] = {
                "step": list(curve.means.steps),
                "count": curve.counts,
                "mean": _finite_values(curve.means.values),
                "min": _finite_values(curve.lows.values),
                "max": _finite_values(curve.highs.values),
            }
        as_json.append({"runs": [each.run.id for each in group.plotted], "label": group.label, "metrics": columns})
    return {"schema": SCHEMA, "over": list(over), "groups": as_json}


def means_csv(groups: Sequence[Repetitions], metrics: Sequence[str]) -> Iterator[Sequence[str]]:
    """The rows of ``plot --over --csv`` for these ``groups`` and ``metrics``, the header first."""
    yield "runs", "metric", "step", "count", "mean", "min", "max"
    for group in groups:
        ids = " ".join(each.run.id for each in group.plotted)
        for name in metrics:
            curve = group.mean(name)
            spreads = zip(curve.means.values, curve.lows.values, curve.highs.values, strict=True)
            for step, count, spread in zip(curve.means.steps, curve.counts, spreads, strict=True):
                yield ids, name, str(step), str(count), *map(repr, spread)


def missing_metrics(plotted: Sequence[Plotted], metrics: Sequence[str]) -> list[str]:
    """Which of the ``plotted`` runs have not logged which of the ``metrics``, as sentences without a full stop."""
    missing = {name: [each.run.id for each in plotted if name not in each.history.curves] for name in metrics}
    return [
        f"run {ids[0]} has not logged {name!r}"
        if len(ids) == 1
        else f"{len(ids)} runs have not logged {name!r}: {', '.join(ids[:_LISTED])}{' ...' * (len(ids) > _LISTED)}"
        for name, ids in missing.items()
        if ids
    ]


def metrics_json(runs: Sequence[Run]) -> dict[str, Any]:
    """What ``plot RUN --json`` prints: the newest values of all metrics."""
    return {
        "schema": SCHEMA,
        "runs": [
            {
                "id": run.id,
                "name": run.name,
                "metrics": {name: _finite_values([value])[0] for name, value in run.metrics.items()},
            }
            for run in runs
        ],
    }


def points_json(plotted: Sequence[Plotted]) -> dict[str, Any]:
    """What ``plot RUN METRIC --json`` prints: points in columns, times in seconds since 1970."""
    return {
        "schema": SCHEMA,
        "runs": [
            {
                "id": run.id,
                "name": run.name,
                "params": dict(run.params),
                "attempts": [
                    {"number": each.number, "first_step": each.first_step, "started_at": iso(each.started_at)}
                    for each in run.attempts
                ],
                "metrics": {
                    name: {**_point_columns(curve.kept), "superseded": _point_columns(curve.superseded)}
                    for name, curve in history.curves.items()
                },
            }
            for run, history in ((each.run, each.history) for each in plotted)
        ],
    }


def _point_columns(points: Points) -> dict[str, Any]:
    return {
        "attempt": list(points.attempts),
        "step": list(points.steps),
        "time": list(points.times),
        "value": _finite_values(points.values),
    }


def _finite_values(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def points_csv(plotted: Sequence[Plotted]) -> Iterator[Sequence[str]]:
    """The rows of ``plot RUN METRIC --csv``, the header first; times are in seconds since 1970."""
    yield "run", "name", "metric", "attempt", "step", "time", "value", "superseded"
    for each in plotted:
        for name, curve in each.history.curves.items():
            for points, superseded in ((curve.kept, "0"), (curve.superseded, "1")):
                for attempt, step, time, value in points.rows():
                    of_run = (each.run.id, each.run.name, name, str(attempt))
                    yield *of_run, str(step), f"{time:.4f}", repr(value), superseded


def write_picture(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts, one below the other, to a file whose suffix names its format: ``.png`` or ``.svg``.

    An existing file is replaced.

    Raises:
        UserError: The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    suffix = path.suffix.lower().removeprefix(".")
    # In memory first: if drawing fails, an existing file stays as it is.
    file = io.BytesIO()
    # Text stays text in an SVG, and the same chart gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "slurmtrain"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(charts)), layout="constrained")
        for number, chart in enumerate(charts):
            _draw_chart(chart, figure.add_subplot(len(charts), 1, number + 1))
        figure.savefig(file, format=suffix, dpi=_DPI, metadata={"Date": None} if suffix == "svg" else None)
    try:
        path.write_bytes(file.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_os_error(error)}") from error


def _draw_chart(chart: Chart, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for number, trace in enumerate(chart.traces):
        # matplotlib's own cycle has ten colours.
        colour = f"C{number % 10}"
        for line in trace.faint:
            axes.plot(*zip(*line, strict=True), color=colour, alpha=0.3)
        for index, line in enumerate(trace.lines):
            # A single point between gaps makes no line.
            marker = "o" if len(line) == 1 else None
            label = _visible_text(trace.label) if not index else None
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=label)
    for mark in chart.marks:
        axes.axvline(mark, color="grey", linestyle=":")
    axes.set_title(_visible_text(chart.title))
    axes.set_xlabel(chart.x_label)
    if chart.log:
        axes.yaxis.set_major_formatter(lambda value, _position: tick_text(10**value))
    if len(chart.traces) > 1:
        axes.legend()


def _visible_text(text: str) -> str:
    """A text without formulas, which matplotlib finds between dollar signs, and without characters that XML forbids.

    A label that begins with an underscore would be left out of the legend.
    """
    visible = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return visible.replace("$", r"\$").replace("_", "\N{ZERO WIDTH SPACE}_", text.startswith("_"))
