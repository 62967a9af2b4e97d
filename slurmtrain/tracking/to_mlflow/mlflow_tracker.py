"""Mirroring runs to MLflow. Each run has one MLflow run, whatever its number of attempts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, SlurmtrainError, TrackingError
from slurmtrain.model.metrics.settled import Place
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.system.owned_files import open_readable
from slurmtrain.tracking.to_mlflow.database import cure, prepare
from slurmtrain.tracking.to_mlflow.live_sender import read_place
from slurmtrain.tracking.to_mlflow.mlflow_runs import ARTIFACTS, MlflowRuns
from slurmtrain.tracking.to_mlflow.sending import Api, MetricLog, first_line, send_system_metrics
from slurmtrain.tracking.tracker import Begun, NoAnswer, Start, TrackedPoint, TrackedRun, Tracker

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_ARTIFACTS_TAG = "slurmtrain.artifacts"
# A larger file is not sent at all: half of a plan or a difference is of no use.
_MOST_BYTES = 4 << 20
# What tells versions of a model apart: the same weights in another format, or another module of the same checkpoint.
_IDENTITY = ("slurmtrain.hash", "slurmtrain.object", "slurmtrain.format")


class MlflowTracker(Tracker):
    """An MLflow store. Importing mlflow takes a second or more."""

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__`; the setting ``uri`` is the store's, by default the runs ``root``'s."""
        super().__init__(settings, root)
        self.uri = settings.get("uri") or root.mlflow_uri
        self.label = f"the MLflow store {self.uri}"
        self._run_id = self._mlflow_id = ""
        self._metrics: MetricLog | None = None
        self.preload()
        import mlflow
        from mlflow import entities
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        failure: tuple[type[Exception], ...] = (MlflowException, OSError, SQLAlchemyError)
        try:
            usable = prepare(self.uri, root, mlflow.MlflowClient)
            self._client = mlflow.MlflowClient(tracking_uri=usable)
        except (MlflowException, OSError, SQLAlchemyError, PathError) as error:
            raise TrackingError(f"the MLflow store {self.uri} cannot be opened: {self._explain(error)}") from error
        self._api = Api(self.uri, self._client, entities, failure)
        self._runs = MlflowRuns(self._api, root)
        self.notes = self._runs.notes

    @classmethod
    def preload(cls) -> None:
        """As :meth:`Tracker.preload`."""
        # No telemetry, no printing, no waiting for minutes for a server that is down, unless the user says otherwise.
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        # After the variables are set: importing MLflow already sets up its telemetry.
        import mlflow  # noqa: F401

        for name in ("mlflow", "alembic"):
            # The exception already says in a sentence what went wrong; MLflow would also print its traceback.
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def _explain(self, error: Exception) -> str:
        """What went wrong in the store, and what to do about it where that is known."""
        return first_line(error) + cure(self.uri, str(error))

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        self._run_id = tracked.run.id
        with self._asking():
            self._mlflow_id = self._runs.open(tracked, start.remote_id, anew=start.anew)
            self._metrics = MetricLog(self._api, self._mlflow_id, start.refused)
        return Begun(self._mlflow_id)

    def sent_elsewhere(self, directory: RunDir, remote_id: str) -> Place | None:
        """As :meth:`Tracker.sent_elsewhere`: from node 0 of the run."""
        live = read_place(directory)
        return live.place if live is not None and (live.uri, live.mlflow_run_id) == (self.uri, remote_id) else None

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        assert self._metrics is not None
        with self._asking():
            return self._metrics.send(points)

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""
        with self._asking():
            shown = self._client.get_run(self._mlflow_id)
            send_system_metrics(self._api, shown, tracked.run, tracked.directory)
            self._send_artifacts(shown, tracked.run, tracked.directory)
            self._runs.describe(shown, tracked)

    def _send_artifacts(self, shown: Any, run: Run, directory: RunDir) -> None:
        """Send the files of a run that its MLflow run does not have; a store without room for them is noted once.

        They are small, and have no secrets: secrets were removed when the files were written.
        """
        plan = directory.submission(run.newest.submission).plan if run.newest else directory.plan
        paths = {
            "spec.yaml": directory.spec,
            "plan.json": plan if plan.exists() else directory.plan,
            "code.diff": directory.code_difference,
            "environment.txt": directory.environment,
        }
        files = {}
        for name, path in paths.items():
            with contextlib.suppress(OSError, PathError), open_readable(path) as file:
                content = file.read(_MOST_BYTES + 1)
                if 0 < len(content) <= _MOST_BYTES:
                    files[name] = content
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        sent = digest.hexdigest()[:16]
        if not files or shown.data.tags.get(_ARTIFACTS_TAG, "").startswith(sent):
            return
        outcome = "sent"
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    Path(folder, name).write_bytes(content)
                self._client.log_artifacts(shown.info.run_id, folder, ARTIFACTS)
        except Exception as error:  # noqa: BLE001 (clients of stores raise anything)
            outcome = "refused"
            note = f"the MLflow store {self.uri} does not take files of runs: {type(error).__name__}: "
            note += (str(error).splitlines() or [""])[0]
            if note not in self.notes:
                self.notes.append(note)
        # Also after a refusal: otherwise each sync would upload the same files in vain.
        self._client.set_tag(shown.info.run_id, _ARTIFACTS_TAG, f"{sent} {outcome}")

    def ensure_model(self, name: str) -> None:
        """Create a model in the store's registry unless there is one of this ``name``. Raises TrackingError."""
        with _registering(f"the model registry of the MLflow store does not take the model {name!r}"):
            try:
                self._client.create_registered_model(name)
            except self._api.failure as error:
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise

    def register(self, mlflow_id: str, file: Path, name: str, tags: Mapping[str, str]) -> str:
        """Upload a file to an MLflow run, and make it a new version of a model that exists; returns the version.

        What is registered again, by its hash, module and format, is the same version.

        Args:
            mlflow_id: The MLflow run.
            file: The exported model.
            name: The name of the model.
            tags: Of the version, among them its hash, module and format.

        Raises:
            TrackingError: The store takes neither files nor the version.
        """
        with _registering(f"the model registry of the MLflow store cannot be read for {name!r}"):
            versions = self._client.search_model_versions(f"name = '{name}'")
        identity = [tags[key] for key in _IDENTITY]
        for version in versions:
            if version.run_id == mlflow_id and [version.tags.get(key) for key in _IDENTITY] == identity:
                return str(version.version)
        folder = f"model/{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"
        with _registering(f"the MLflow store does not take the file {file.name}"):
            # The file before its version: after a kill in between, the next try puts it into the same folder again.
            self._client.log_artifact(mlflow_id, str(file), folder)
        with _registering(f"the model registry of the MLflow store does not take the model {name!r}"):
            source = f"{self._client.get_run(mlflow_id).info.artifact_uri}/{folder}"
            return str(self._client.create_model_version(name, source, mlflow_id, tags=dict(tags)).version)

    @property
    def client(self) -> Any:
        """The ``mlflow.MlflowClient`` of its store."""
        return self._client

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever the store answers concerns the current run; whatever MLflow prints is no data of slurmtrain's."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except SlurmtrainError:
            raise
        except Exception as error:  # MLflow's plugins and drivers raise anything, and other runs have other stores
            from requests.exceptions import ConnectionError as NotConnected
            from requests.exceptions import Timeout

            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, NotConnected | Timeout):
                # MLflow does not name the cause of each.
                reason = reason.__cause__ or reason.__context__
            if reason is not None:
                raise NoAnswer(f"the MLflow store {self.uri} does not answer: {first_line(error)}") from error
            raise TrackingError(
                f"the MLflow store {self.uri} did not take run {self._run_id}: {self._explain(error)}"
            ) from error


@contextlib.contextmanager
def _registering(problem: str) -> Iterator[None]:
    """Raises TrackingError with this ``problem`` for whatever the client raises."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # as above
        raise TrackingError(f"{problem}: {first_line(error)}") from error
