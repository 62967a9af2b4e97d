"""The curves of several runs for a page: as many points as a screen can show, and the mean over repetitions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.history import History, read_history
from slurmtrain.model.metrics.chart import outline
from slurmtrain.model.metrics.columns import MetricSummary
from slurmtrain.model.metrics.curves import Curve, MeanCurve, Points
from slurmtrain.model.run.run import Run
from slurmtrain.ops.plot import Plotted, Repetitions, repetitions
from slurmtrain.ops.shared.workspace import Workspace

# So many points make about a megabyte, and are drawn within a second.
_POINTS = 50_000
# What is left of a curve of a thousand runs, and what a single one needs at most: columns of up to four points.
_FEWEST, _COLUMNS = 8, 400
_MOST_METRICS = 6
# So many logged values are read, and averaged, within a few seconds.
_READ, _AVERAGED = 20_000_000, 2_000_000


def curve_facts(
    workspace: Workspace, runs: Sequence[Run], metrics: Sequence[str], over: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The curves, by metric, and sentences about what is left out.

    A metric has ``runs`` with the steps and values of each (null between two parts of a curve), and ``means`` over the
    runs that differ only in some params: ``label``, ``runs``, and for some steps the ``mean``, ``low`` and ``high``.

    Args:
        workspace: Where the runs are.
        runs: The runs, the most important first.
        metrics: The names of metrics, the most important first.
        over: The params that may differ between repetitions, with ``params.``; empty: there are no means.
    """
    summaries = workspace.store.surviving_metrics([run.id for run in runs], metrics)
    shown = [name for name in metrics if any(name in of_run for of_run in summaries.values())]
    curves = sum(shown[0] in of_run for of_run in summaries.values()) if shown else 0
    # The further metrics have to share what the first one leaves.
    fitting = max(1, _POINTS // max(1, 4 * _FEWEST * curves))
    chosen = shown[: min(_MOST_METRICS, fitting)]
    notes = [f"the page has no curves of {_name_metrics(shown[len(chosen) :])}"] if len(shown) > len(chosen) else []
    kept, total = [], 0
    for run in runs:
        total += sum(each.points for name, each in summaries.get(run.id, {}).items() if name in chosen)
        if total > _READ:
            break
        kept.append(run)
    if left_out := len(runs) - len(kept):
        notes.append(f"the page has no curves of {left_out} of {len(runs)} runs, which have logged too many values")
    averages = bool(over) and total <= _AVERAGED
    if over and not averages:
        notes.append(
            "the page has no mean curves, since the runs have logged too many values; 'plot --over' draws them"
        )
    columns = max(_FEWEST, min(_COLUMNS, _POINTS // max(1, 4 * len(kept) * len(chosen))))
    facts: dict[str, Any] = {name: {"runs": [], "means": []} for name in chosen}
    # Group by group: the histories of all runs need not fit into memory.
    for group in _repetitions_of(kept, over if averages else ()):
        plotted = [
            Plotted(each.run, _history(workspace, each.run, chosen, summaries.get(each.run.id, {})))
            for each in group.plotted
        ]
        read = Repetitions(plotted, group.label)
        for each in read.plotted:
            for name, curve in each.history.curves.items():
                if len(curve.kept):
                    facts[name]["runs"].append({"run": each.run.id, **_thinned_curve(curve.kept, columns)})
        if averages and len(read.plotted) > 1:
            for name in chosen:
                if (mean := read.mean(name)).counts:
                    ids = [each.run.id for each in read.plotted]
                    facts[name]["means"].append({"label": group.label, "runs": ids, **_thinned_mean(mean, columns)})
    return facts, notes


def _repetitions_of(runs: Sequence[Run], over: Sequence[str]) -> Sequence[Repetitions]:
    plotted = [Plotted(run, History({})) for run in runs]
    return repetitions(plotted, over) if over else [Repetitions([each], "") for each in plotted]


def _history(workspace: Workspace, run: Run, names: Collection[str], summaries: Mapping[str, MetricSummary]) -> History:
    """A run's curves as far as its summaries: values that were logged since would not fit the rest of the page.

    There are none if its files are gone or somebody else's, which the table does not depend on.
    """
    try:
        curves = read_history(run, workspace.root.run(run.id), names).curves
    except PathError:
        return History({})
    if run.ended:
        return History(curves)
    return History(
        {name: Curve(_until(curves[name].kept, each.last_step)) for name, each in summaries.items() if name in curves}
    )


def _until(points: Points, step: int) -> Points:
    end = bisect_right(points.steps, step)
    return Points(points.attempts[:end], points.steps[:end], points.times[:end], points.values[:end])


def _name_metrics(names: Sequence[str]) -> str:
    return f"the metric {names[0]!r}" if len(names) == 1 else f"{len(names)} metrics, such as {names[0]!r}"


def _thinned_curve(points: Points, columns: int) -> Mapping[str, Any]:
    """The ``step`` and ``value`` of what is drawn of a curve."""
    steps: list[float] = []
    values: list[float | None] = []
    for number, line in enumerate(outline(points.steps, points.values, columns)):
        if number:
            steps.append(line[0][0])
            values.append(None)
        steps += [step for step, _ in line]
        values += [_drawable(value) for _, value in line]
    return {"step": steps, "value": values}


def _thinned_mean(curve: MeanCurve, columns: int) -> Mapping[str, Any]:
    """What is drawn of a mean: of several steps that fall together, the last mean and the bounds of all."""
    steps, means = curve.means.steps, curve.means.values
    width = max(1, math.ceil(len(steps) / (2 * columns)))
    spans = [(first, min(first + width, len(steps))) for first in range(0, len(steps), width)]
    return {
        "step": [steps[last - 1] for _, last in spans],
        "mean": [_drawable(means[last - 1]) for _, last in spans],
        "low": [_drawable(min(curve.lows.values[first:last])) for first, last in spans],
        "high": [_drawable(max(curve.highs.values[first:last])) for first, last in spans],
    }


def _drawable(value: float) -> float | None:
    """A value as exact as it can be drawn; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
