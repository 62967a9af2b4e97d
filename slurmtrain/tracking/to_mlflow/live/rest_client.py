"""The part of MLflow's client that slurmtrain uses, over REST: for a process that has no room for mlflow itself.

Methods, arguments and results have the same names as in ``mlflow.MlflowClient``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurmtrain.tracking.to_mlflow.live.rest import RestError, RestServer


class Param(NamedTuple):
    """A param of a run."""

    key: str
    value: str


class RunTag(NamedTuple):
    """A tag of a run."""

    key: str
    value: str


class Metric(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``timestamp`` milliseconds after 1970."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run is. ``start_time``: in milliseconds since 1970."""

    run_id: str
    experiment_id: str
    status: str
    lifecycle_stage: str
    start_time: int


@dataclass(frozen=True, slots=True)
class RunData:
    """What was logged to a run: the newest values, by name."""

    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run in MLflow."""

    info: RunInfo
    data: RunData


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment in MLflow."""

    experiment_id: str
    lifecycle_stage: str


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file or a folder among the artifacts of a run."""

    path: str


class RestClient:
    """A client of an MLflow server. Each method raises RestError."""

    def __init__(self, server: RestServer) -> None:
        """``server``: where requests go."""
        self._server = server

    # Arguments and results are the same as in mlflow.MlflowClient.
    def get_experiment_by_name(self, name: str) -> Experiment | None:
        """The experiment of this name; None if there is none."""
        try:
            experiment = _part(self._server.get("experiments/get-by-name", experiment_name=name), "experiment")
        except RestError as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return Experiment(str(_part(experiment, "experiment_id")), str(experiment.get("lifecycle_stage", "active")))

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        """The id of a new experiment."""
        content = {"name": name, "artifact_location": artifact_location}
        return str(_part(self._server.post("experiments/create", content), "experiment_id"))

    def get_run(self, run_id: str) -> ShownRun:
        """A run, which may have been deleted."""
        return _run(_part(self._server.get("runs/get", run_id=run_id), "run"))

    def search_runs(
        self,
        experiment_ids: Sequence[str],
        filter_string: str = "",
        max_results: int = 1000,
        order_by: Sequence[str] | None = None,
    ) -> list[ShownRun]:
        """The runs that fulfil a condition and were not deleted.

        Args:
            experiment_ids: Ids of their experiments.
            filter_string: The condition, in MLflow's words.
            max_results: The largest number of runs.
            order_by: Their order, in MLflow's words.
        """
        content = {
            "experiment_ids": list(experiment_ids),
            "filter": filter_string,
            "max_results": max_results,
            "order_by": order_by,
        }
        return [_run(run) for run in self._server.post("runs/search", content).get("runs", ())]

    def create_run(
        self, experiment_id: str, start_time: int | None, tags: Mapping[str, str], run_name: str
    ) -> ShownRun:
        """A new run.

        Args:
            experiment_id: The id of its experiment.
            start_time: When it started, in milliseconds since 1970; None: now.
            tags: Its tags.
            run_name: Its name.
        """
        content = {
            "experiment_id": experiment_id,
            "user_id": tags.get("mlflow.user", "unknown"),
            "start_time": _now() if start_time is None else start_time,
            "tags": [RunTag(*tag)._asdict() for tag in tags.items()],
            "run_name": run_name,
        }
        return _run(_part(self._server.post("runs/create", content), "run"))

    def update_run(self, run_id: str, status: str, end_time: int | None = None) -> None:
        """Set the ``status`` of a run by its ``run_id``, and its ``end_time``, in milliseconds since 1970."""
        self._server.post("runs/update", {"run_id": run_id, "status": status, "end_time": end_time})

    def set_terminated(self, run_id: str, status: str, end_time: int | None = None) -> None:
        """Like :meth:`update_run`, of ``run_id``, ``status`` and ``end_time``; it ended now if that is None."""
        self.update_run(run_id, status, _now() if end_time is None else end_time)

    def delete_run(self, run_id: str) -> None:
        """Delete a run, which can be undone."""
        self._server.post("runs/delete", {"run_id": run_id})

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """Set the tag ``key`` of the run ``run_id`` to ``value``."""
        self._server.post("runs/set-tag", {"run_id": run_id, "key": key, "value": value})

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        """Add ``metrics``, ``params`` and ``tags`` to the run ``run_id``."""
        content = {
            "run_id": run_id,
            "metrics": [{**metric._asdict(), "value": _plain(metric.value)} for metric in metrics],
            "params": [param._asdict() for param in params],
            "tags": [tag._asdict() for tag in tags],
        }
        self._server.post("runs/log-batch", {name: value or None for name, value in content.items()})

    def list_artifacts(self, run_id: str) -> list[ArtifactFile]:
        """What is at the top of the artifacts of a run."""
        return [
            ArtifactFile(file["path"]) for file in self._server.get("artifacts/list", run_id=run_id).get("files", ())
        ]


def _run(answer: Any) -> ShownRun:
    info, data = _part(answer, "info"), answer.get("data", {})
    values = {
        kind: {_part(each, "key"): each.get("value") for each in data.get(kind, ())}
        for kind in ("params", "tags", "metrics")
    }
    return ShownRun(
        RunInfo(
            run_id=str(_part(info, "run_id")),
            experiment_id=str(_part(info, "experiment_id")),
            status=str(_part(info, "status")),
            lifecycle_stage=str(_part(info, "lifecycle_stage")),
            start_time=int(info.get("start_time", 0)),
        ),
        RunData(values["params"], values["tags"], values["metrics"]),
    )


def _part(answer: Any, name: str) -> Any:
    """A part of an answer. Raises RestError if there is none: not everything that answers is MLflow."""
    if not isinstance(answer, Mapping) or name not in answer:
        raise RestError(f"the answer is not MLflow's: it has no {name!r}")
    return answer[name]


def _plain(value: float) -> float | str:
    """A number as JSON for protobuf has it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _now() -> int:
    return int(time.time() * 1000)
