"""The metrics in an MLflow store of any kind, through a client of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slurmtrain.tracking.to_mlflow.metrics import MetricValue


class ClientStore:
    """A store, as :class:`.metrics.MetricStore`."""

    def __init__(self, client: Any, entities: Any) -> None:
        """``client``: for the store. ``entities``: the module with its classes, such as ``mlflow.entities``."""
        self._client = client
        self._entities = entities

    def log_metrics(self, run: str, values: Sequence[MetricValue]) -> None:
        """As :meth:`.metrics.MetricStore.log_metrics`."""
        metrics = [self._entities.Metric(each.name, each.value, each.at_ms, each.step) for each in values]
        self._client.log_batch(run, metrics=metrics)

    def metric_names(self, run: str) -> Iterable[str]:
        """As :meth:`.metrics.MetricStore.metric_names`."""
        names: Iterable[str] = self._client.get_run(run).data.metrics
        return names

    def is_deleted(self, run: str) -> bool:
        """As :meth:`.metrics.MetricStore.is_deleted`."""
        return bool(self._client.get_run(run).info.lifecycle_stage == "deleted")
