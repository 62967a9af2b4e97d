"""Sending metrics to an MLflow run.

Metrics keep the time at which they were logged. MLflow identifies a metric by (key, timestamp, step, run, value), so
one that is sent twice is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slurmtrain.model.metrics.settled import Fate
from slurmtrain.tracking.to_mlflow.sender import Sender
from slurmtrain.tracking.tracker import TrackedPoint

# MLflow's limit for one call.
_METRICS_A_CALL = 1000
# Where values are that do not belong to the surviving line.
_PREFIXES = {Fate.FINAL: "", Fate.REPLAYED: "replayed/", Fate.OPEN: "live/"}


class MetricLog:
    """The metrics of one MLflow run."""

    def __init__(self, client: Any, mlflow_id: str, failure: tuple[type[Exception], ...]) -> None:
        """Begin sending.

        Args:
            client: MLflow's client.
            mlflow_id: The MLflow run.
            failure: What the client raises.
        """
        from mlflow.entities import Metric

        self._sender: Sender[_Value] = Sender(
            lambda value, name: Metric(name, value.value, value.at_ms, value.step),
            lambda entities: client.log_batch(mlflow_id, metrics=entities),
            failure,
            lambda: client.get_run(mlflow_id).data.metrics,
        )

    def send(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """Send points; returns the names of metrics that the store does not take, and why."""
        values = [value for point in points for value in _values(point)]
        for start in range(0, len(values), _METRICS_A_CALL):
            self._sender.send(values[start : start + _METRICS_A_CALL])
        prefixes = tuple(prefix for prefix in _PREFIXES.values() if prefix)
        return {
            name.removeprefix(next((each for each in prefixes if name.startswith(each)), "")): why
            for name, why in self._sender.refused.items()
        }


class _Value(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``at_ms`` milliseconds after 1970."""

    name: str
    value: float
    at_ms: int
    step: int


def _values(point: TrackedPoint) -> Iterator[_Value]:
    for name, value in point.metrics.items():
        # MLflow refuses times before 1970.
        yield _Value(f"{_PREFIXES[point.fate]}{name}", float(value), max(0, int(point.time * 1000)), point.step)
