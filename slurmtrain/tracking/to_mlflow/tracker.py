"""Mirroring runs to MLflow. Each run has one MLflow run, whatever its number of attempts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, SlurmtrainError, TrackingError
from slurmtrain.model.metrics.settled import Place
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.tracking.to_mlflow import model_registry
from slurmtrain.tracking.to_mlflow.artifacts import send_artifacts
from slurmtrain.tracking.to_mlflow.client_store import ClientStore
from slurmtrain.tracking.to_mlflow.database import cure, prepare
from slurmtrain.tracking.to_mlflow.live.live_place import read_place
from slurmtrain.tracking.to_mlflow.metrics import MetricLog
from slurmtrain.tracking.to_mlflow.run import MlflowRuns
from slurmtrain.tracking.to_mlflow.sender import first_line
from slurmtrain.tracking.to_mlflow.system_metrics import send_system_metrics
from slurmtrain.tracking.tracker import Begun, NoAnswer, Start, TrackedPoint, TrackedRun, Tracker


class MlflowTracker(Tracker):
    """An MLflow store. Importing mlflow takes a second or more."""

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__`; the setting ``uri`` is the store's, by default the runs ``root``'s."""
        super().__init__(settings, root)
        self.uri = settings.get("uri") or root.mlflow_uri
        self.label = f"the MLflow store {self.uri}"
        self._run_id = self._mlflow_id = ""
        self._metrics: MetricLog | None = None
        _quiet_environment()
        import mlflow
        from mlflow import entities
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        for name in ("mlflow", "alembic"):
            # The exception already says in a sentence what went wrong; MLflow would also print its traceback.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._failure: tuple[type[Exception], ...] = (MlflowException, OSError, SQLAlchemyError)
        try:
            usable = prepare(self.uri, root, mlflow.MlflowClient)
            self._client = mlflow.MlflowClient(tracking_uri=usable)
        except (*self._failure, PathError) as error:
            raise TrackingError(f"the MLflow store {self.uri} cannot be opened: {self._explain(error)}") from error
        self._entities = entities
        self._records = MlflowRuns(self._client, entities, self.uri, root, self._failure)
        self.notes = self._records.notes

    def _explain(self, error: Exception) -> str:
        """What went wrong in the store, and what to do about it where that is known."""
        return first_line(error) + cure(self.uri, str(error))

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        self._run_id = tracked.run.id
        with self._asking():
            self._mlflow_id = self._records.open(tracked, start.remote_id, anew=start.anew)
            store = ClientStore(self._client, self._entities)
            self._metrics = MetricLog(store, self._mlflow_id, self._failure, start.refused)
        return Begun(self._mlflow_id)

    def sent_elsewhere(self, directory: RunDir, remote_id: str) -> Place | None:
        """As :meth:`Tracker.sent_elsewhere`: from node 0 of the run."""
        live = read_place(directory)
        is_same = live is not None and (live.uri, live.mlflow_run_id) == (self.uri, remote_id)
        return live.place if live is not None and is_same else None

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        assert self._metrics is not None
        with self._asking():
            return self._metrics.send(points)

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""
        with self._asking():
            shown = self._client.get_run(self._mlflow_id)
            send_system_metrics(self._client, shown, tracked.run, tracked.directory)
            if problem := send_artifacts(self._client, shown, tracked.run, tracked.directory):
                self._note(f"the MLflow store {self.uri} does not take files of runs: {problem}")
            self._records.describe(shown, tracked)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def ensure_model(self, name: str) -> None:
        """Create a model in the store's registry unless there is one of this ``name``. Raises TrackingError."""
        with contextlib.redirect_stdout(sys.stderr):
            model_registry.ensure_model(self._client, name)

    def register(self, mlflow_id: str, file: Path, name: str, tags: Mapping[str, str]) -> str:
        """Make a file a new version of a model that exists; returns the version. Raises TrackingError.

        Args:
            mlflow_id: The MLflow run.
            file: The exported model.
            name: The name of the model.
            tags: Of the version, among them its hash, module and format.
        """
        with contextlib.redirect_stdout(sys.stderr):
            return model_registry.register_file(self._client, mlflow_id, file, name, tags)

    def experiment_of(self, mlflow_id: str) -> tuple[str, str]:
        """The id and the name of the experiment that an MLflow run belongs to. Raises TrackingError."""
        try:
            experiment = self._client.get_run(mlflow_id).info.experiment_id
            return str(experiment), str(self._client.get_experiment(experiment).name)
        except Exception as error:  # MLflow's plugins and drivers raise anything, and other runs have other stores
            raise TrackingError(
                f"the MLflow store {self.uri} does not show run {mlflow_id}: {first_line(error)}"
            ) from error

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever the store answers concerns the current run; whatever MLflow prints is no data of slurmtrain's."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except SlurmtrainError:
            raise
        except Exception as error:  # as above
            if _is_no_answer(error):
                raise NoAnswer(f"the MLflow store {self.uri} does not answer: {first_line(error)}") from error
            raise TrackingError(
                f"the MLflow store {self.uri} did not take run {self._run_id}: {self._explain(error)}"
            ) from error


def _is_no_answer(error: BaseException | None) -> bool:
    """Whether an exception of MLflow's client says that nobody answers, and not that somebody refuses."""
    from requests.exceptions import ConnectionError as NotConnected
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, NotConnected | Timeout):
            return True
        # MLflow does not name the cause of each.
        error = error.__cause__ or error.__context__
    return False


def _quiet_environment() -> None:
    """No telemetry, no printing, no waiting for minutes for a server that is down, unless the user says otherwise."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
