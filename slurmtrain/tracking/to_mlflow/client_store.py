"""An MLflow store of any kind, through MLflow's own client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slurmtrain.tracking.to_mlflow.metrics import MetricValue


class ClientStore:
    """A store, as :class:`.metrics.MetricStore`."""

    def __init__(self, client: Any) -> None:
        """``client``: MLflow's, for the store."""
        self._client = client

    def log_metrics(self, run: str, values: Sequence[MetricValue]) -> None:
        """As :meth:`.metrics.MetricStore.log_metrics`."""
        from mlflow.entities import Metric

        self._client.log_batch(run, metrics=[Metric(each.name, each.value, each.at_ms, each.step) for each in values])

    def metric_names(self, run: str) -> Iterable[str]:
        """As :meth:`.metrics.MetricStore.metric_names`."""
        names: Iterable[str] = self._client.get_run(run).data.metrics
        return names

    def is_deleted(self, run: str) -> bool:
        """As :meth:`.metrics.MetricStore.is_deleted`."""
        return bool(self._client.get_run(run).info.lifecycle_stage == "deleted")
