"""Mirroring runs to MLflow: the only user of mlflow. Each Run has one MLflow run, whatever its number of attempts.

Metrics keep the time at which they were logged. MLflow identifies a metric by (key, timestamp, step, run, value), so
one that is sent twice is stored once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slurmtrain.errors import PathError, TrackingError
from slurmtrain.model.run.journal import read_lines
from slurmtrain.model.run.layout import RunDir, RunsRoot, split_attempt
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan
from slurmtrain.system.files import create_private, describe_os_error
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS, has_record_locks

# MLflow's limits for one call and for one value.
_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 5000
_RUN_TAG = "slurmtrain.run_id"
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "lost": "FAILED", "cancelled": "KILLED"}
_CHUNK = 8 * 2**20


class Tracker:
    """An MLflow store. Importing mlflow takes a second or more, so make one only when there is something to send."""

    def __init__(self, uri: str, root: RunsRoot) -> None:
        """Connect to the store at ``uri``. Raises TrackingError if it cannot be reached."""
        self.uri = uri
        self._root = root
        _quiet_environment()
        if uri == root.mlflow_uri:
            try:
                create_private(root.mlflow_db)
            except OSError as error:
                raise TrackingError(f"cannot write {root.mlflow_db}: {describe_os_error(error)}") from error
            except PathError as error:
                raise TrackingError(str(error)) from error
        import mlflow
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        for name in ("mlflow", "alembic"):
            # The exception already says in a sentence what went wrong; MLflow would also print its traceback.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._failure: tuple[type[Exception], ...] = (MlflowException, OSError, SQLAlchemyError)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=self._usable_uri())
        except self._failure as error:
            raise TrackingError(f"the MLflow store {uri} cannot be opened: {_first_line(error)}") from error

    def _usable_uri(self) -> str:
        """The store's URI; that of our own store is opened without locks where its file system has none.

        Nobody else writes to it meanwhile: whoever mirrors runs holds the runs root's lock for that.
        """
        if self.uri != self._root.mlflow_uri or has_record_locks(self._root.tracking_lock):
            return self.uri
        return f"sqlite:///file:{quote(str(self._root.mlflow_db))}?vfs={SQLITE_WITHOUT_LOCKS}&uri=true"

    def identify(self, run: Run, plan: Plan) -> str:
        """The id of the MLflow run that mirrors this run, created if there is none. Raises TrackingError."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return self._find_or_create(run, plan)
        except self._failure as error:
            raise self._refused(run, error) from error

    def send(self, mlflow_id: str, run: Run, directory: RunDir, offsets: Mapping[str, int]) -> dict[str, int]:
        """Send what is new in a run. After a failure, what was sent stays, and sending it again adds nothing.

        Args:
            mlflow_id: The MLflow run that mirrors the run.
            run: The run.
            directory: Its directory.
            offsets: How far each metrics file was sent before, in bytes.

        Returns:
            How far each metrics file has been sent now, in bytes.

        Raises:
            TrackingError: The store cannot be reached, or refuses.
        """
        try:
            # Standard output is for slurmtrain's own data, whatever MLflow prints there.
            with contextlib.redirect_stdout(sys.stderr):
                self._tag(mlflow_id, run)
                sent = self._send_metrics(mlflow_id, directory, offsets)
                self._set_status(mlflow_id, run)
        except self._failure as error:
            raise self._refused(run, error) from error
        return sent

    def _refused(self, run: Run, error: Exception) -> TrackingError:
        return TrackingError(f"the MLflow store {self.uri} did not take run {run.id}: {_first_line(error)}")

    def _find_or_create(self, run: Run, plan: Plan) -> str:
        experiment = self._experiment(plan.spec.tracking.mlflow.experiment or run.name)
        existing = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.id}'", max_results=1)
        if existing:
            return str(existing[0].info.run_id)
        tags = {
            _RUN_TAG: run.id,
            "slurmtrain.plan_hash": run.plan_hash or "",
            "slurmtrain.dir": str(self._root.path / run.id),
        }
        tags.update({f"mlflow.source.git.{key}": str(value) for key, value in (run.git or {}).items()})
        created = self._client.create_run(
            experiment, start_time=_ms(run.submitted_at), tags=tags, run_name=f"{run.name}-{run.id}"
        )
        self._log_params(created.info.run_id, plan.spec.params)
        return str(created.info.run_id)

    def _experiment(self, name: str) -> str:
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        # Without an explicit location, a local store would put artifacts below the current directory.
        location = self._root.mlflow_artifacts.as_uri() if self.uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(name, artifact_location=location))

    def _log_params(self, mlflow_id: str, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        flat = [Param(_key(name), str(value)[:_PARAM_LENGTH]) for name, value in _flatten(params)]
        for start in range(0, len(flat), _PARAMS_A_CALL):
            self._client.log_batch(mlflow_id, params=flat[start : start + _PARAMS_A_CALL])

    def _tag(self, mlflow_id: str, run: Run) -> None:
        from mlflow.entities import RunTag

        tags = {
            "slurmtrain.state": run.state,
            "slurmtrain.reason": run.reason,
            "slurmtrain.attempts": str(len(run.attempts)),
            "slurmtrain.lost_steps": str(run.lost_steps if run.lost_steps is not None else ""),
        }
        self._client.log_batch(mlflow_id, tags=[RunTag(key, value[:_TAG_LENGTH]) for key, value in tags.items()])

    def _send_metrics(self, mlflow_id: str, directory: RunDir, offsets: Mapping[str, int]) -> dict[str, int]:
        from mlflow.entities import Metric

        sent = dict(offsets)
        for name, path in _metrics_files(directory):
            batch: list[Metric] = []
            for record, end in _records(path, name, sent.get(name, 0)):
                for key, value in record.get("metrics", {}).items():
                    if len(batch) == _METRICS_A_CALL:
                        self._client.log_batch(mlflow_id, metrics=batch)
                        batch = []
                    batch.append(Metric(_key(key), float(value), int(record["t"] * 1000), int(record["step"])))
                sent[name] = end
            if batch:
                self._client.log_batch(mlflow_id, metrics=batch)
        return sent

    def _set_status(self, mlflow_id: str, run: Run) -> None:
        if run.state in _STATUS:
            self._client.set_terminated(mlflow_id, _STATUS[run.state], _ms(run.ended_at))
        elif self._client.get_run(mlflow_id).info.status != "RUNNING":
            self._client.update_run(mlflow_id, status="RUNNING")


def _quiet_environment() -> None:
    """No telemetry, no printing, no waiting for minutes for a server that is down, unless the user says otherwise."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)


def _metrics_files(directory: RunDir) -> list[tuple[str, Path]]:
    try:
        attempts = sorted(path for path in directory.attempts.iterdir() if split_attempt(path.name))
    except OSError:
        return []
    return [(f"attempts/{path.name}/metrics.jsonl", path / "metrics.jsonl") for path in attempts]


def _records(path: Path, name: str, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Records of a metrics file from a byte ``offset`` on, each with the offset after it."""
    while True:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                reading = read_lines(file.read(_CHUNK), offset, name)
        except OSError:
            return
        if reading.end == offset:
            return
        ends = [start for start, _ in reading.records[1:]] + [reading.end]
        for (_, record), end in zip(reading.records, ends, strict=False):
            if isinstance(record.get("step"), int):
                yield record, end
        offset = reading.end


def _flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _key(name: str) -> str:
    """A name that MLflow accepts: letters, digits, and ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _ms(time: float | None) -> int | None:
    return None if time is None else int(time * 1000)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
