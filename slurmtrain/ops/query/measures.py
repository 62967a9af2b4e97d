"""Measures of runs' metrics in questions: from the registry's summaries, else from the curves themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.metrics.curves import Points
from slurmtrain.model.query.measures import Measure, read_measure
from slurmtrain.ops.history import read_history
from slurmtrain.ops.shared.views import RunRecord
from slurmtrain.ops.shared.workspace import Workspace

_METRICS = "metrics."
# How many runs are looked up at once whose curves may be needed.
_AT_ONCE = 500


def attach_measures(workspace: Workspace, records: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
    """Let records have the measures among some names as fields, unless no run has logged such a metric.

    Values are computed when they are first read: finding the curves of runs that other conditions leave out would cost
    more than everything else.

    Args:
        workspace: Where the runs are.
        records: The runs; colleagues' runs are passed over.
        names: Names of fields; some may be measures.
    """
    measures = {name: measure for name in names if (measure := read_measure(name)) is not None}
    if not measures:
        return
    own = {record.listed.id: record for record in records if isinstance(record, RunRecord)}
    metrics = {measure.metric for measure in measures.values()}
    is_by_curve = not all(measure.is_summarised for measure in measures.values())
    # What a run has reached is what any of its metrics has.
    summaries = workspace.store.surviving_metrics(list(own), None if is_by_curve else metrics)
    curves = _Curves(workspace, list(own))

    def value(measure: Measure, record: RunRecord) -> float | None:
        of_run = summaries.get(record.listed.id, {})
        if measure.metric not in of_run:
            return None
        if measure.is_summarised:
            return measure.of_summary(of_run[measure.metric])
        points = curves.points(record.listed.id, measure.metric)
        return measure.of_curve(points.steps, points.values, max(each.last_step for each in of_run.values()))

    logged = {name for of_run in summaries.values() for name in of_run}
    fields: dict[str, Callable[[RunRecord], float | None]] = {
        name: partial(value, measure) for name, measure in measures.items() if measure.metric in logged
    }
    for record in own.values():
        record.measures = {**record.measures, **fields}


class _Curves:
    """The curves of some runs, looked up many at once."""

    def __init__(self, workspace: Workspace, run_ids: Sequence[str]) -> None:
        self._workspace = workspace
        self._batches = [run_ids[first : first + _AT_ONCE] for first in range(0, len(run_ids), _AT_ONCE)]
        self._batch_of = {run_id: number for number, batch in enumerate(self._batches) for run_id in batch}
        self._load = cache(self._load_batch)

    def points(self, run_id: str, metric: str) -> Points:
        """What survives of a metric; nothing if its files cannot be read."""
        run = self._load(self._batch_of[run_id]).get(run_id)
        try:
            curves = read_history(run, self._workspace.root.run(run_id), [metric]).curves if run else {}
        except PathError:
            curves = {}
        return curves[metric].kept if metric in curves else Points()

    def _load_batch(self, number: int) -> Mapping[str, Any]:
        return self._workspace.store.load_all(self._batches[number])


def fields_of(workspace: Workspace, records: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, str]:
    """The fields that names of metrics and measures stand for, by these names; the records get the measures.

    Args:
        workspace: Where the runs are.
        records: The runs.
        names: Metrics, without ``metrics.``, and measures; a metric comes first if both are called that.
    """
    metrics = {name for record in records for name in record["metrics"]}
    fields = {name: name if name not in metrics and read_measure(name) else f"{_METRICS}{name}" for name in names}
    attach_measures(workspace, records, fields.values())
    return fields
