"""Sending metrics to an MLflow run.

Metrics keep the time at which they were logged. MLflow identifies a metric by (key, timestamp, step, run, value), so
one that is sent twice is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from slurmtrain.errors import TrackingError
from slurmtrain.model.metrics.settled import Fate
from slurmtrain.tracking.to_mlflow.sender import Sender, is_refusal
from slurmtrain.tracking.tracker import TrackedPoint

# MLflow's limit for one call.
_METRICS_A_CALL = 1000
PREFIXES = {Fate.FINAL: "", Fate.REPLAYED: "replayed/", Fate.OPEN: "live/"}
"""What the names of values begin with that do not belong to the surviving line."""


class MlflowRunDeleted(TrackingError):
    """Somebody has deleted the MLflow run."""

    def __init__(self, mlflow_id: str) -> None:
        """``mlflow_id``: the MLflow run."""
        super().__init__(f"MLflow run {mlflow_id} was deleted in MLflow: 'slurmtrain sync' begins another one")


class MetricValue(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``at_ms`` milliseconds after 1970."""

    name: str
    value: float
    at_ms: int
    step: int


class MetricStore(Protocol):
    """What can be asked of an MLflow store; runs are named by their ids there."""

    def log_metrics(self, run: str, values: Sequence[MetricValue]) -> None:
        """Add ``values`` to a ``run``, at most as many as MLflow takes in one call."""

    def metric_names(self, run: str) -> Iterable[str]:
        """The names of the metrics that a run has."""

    def is_deleted(self, run: str) -> bool:
        """Whether a run was deleted, which MLflow can undo."""


class MetricLog:
    """The metrics of one MLflow run."""

    def __init__(
        self, store: MetricStore, mlflow_id: str, failure: tuple[type[Exception], ...], refused: Sequence[str] = ()
    ) -> None:
        """Begin sending.

        Args:
            store: Where the run is.
            mlflow_id: The MLflow run.
            failure: What the store raises.
            refused: Names that the store does not take, as :meth:`send` has returned them.
        """

        def log(values: list[MetricValue]) -> None:
            try:
                store.log_metrics(mlflow_id, values)
            except failure as error:
                # MLflow refuses everything then, in the same words as an invalid name.
                if is_refusal(error) and store.is_deleted(mlflow_id):
                    raise MlflowRunDeleted(mlflow_id) from error
                raise

        self._sender: Sender[MetricValue] = Sender(
            lambda value, name: value._replace(name=name),
            log,
            failure,
            lambda: store.metric_names(mlflow_id),
            dict.fromkeys(refused, ""),
        )

    def send(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """Send points; returns the names that the store does not take, prefixed names on their own, and why."""
        values = [value for point in points for value in _values(point)]
        for start in range(0, len(values), _METRICS_A_CALL):
            self._sender.send(values[start : start + _METRICS_A_CALL])
        return self._sender.refused


def _values(point: TrackedPoint) -> Iterator[MetricValue]:
    for name, value in point.metrics.items():
        # MLflow refuses times before 1970.
        yield MetricValue(f"{PREFIXES[point.fate]}{name}", float(value), max(0, int(point.time * 1000)), point.step)
