"""Mirroring runs to MLflow: the only user of mlflow. Each Run has one MLflow run, whatever its number of attempts.

Metrics keep the time at which they were logged. MLflow identifies a metric by (key, timestamp, step, run, value), so
one that is sent twice is stored once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from slurmtrain.errors import PathError, SlurmtrainError, TrackingError
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.model.run.progress import points_of
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan
from slurmtrain.system.files import create_private, describe_os_error
from slurmtrain.system.journal_files import Piece, journal_files, read_pieces
from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS, has_record_locks
from slurmtrain.tracking.names import flat_name, legal_name
from slurmtrain.tracking.sender import Sender, first_line

# MLflow's limits for one call and for one value.
_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 5000
_NAME_LENGTH = 200
_RUN_TAG = "slurmtrain.run_id"
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "lost": "FAILED", "cancelled": "KILLED"}


@dataclass(frozen=True, slots=True)
class Sent:
    """How far each metrics file has been sent, in bytes, and the names of metrics that the store does not take."""

    offsets: Mapping[str, int]
    refused: Sequence[str] = ()


class Tracker:
    """An MLflow store. Importing mlflow takes a second or more, so make one only when there is something to send."""

    def __init__(self, uri: str, root: RunsRoot) -> None:
        """Connect to the store at ``uri``. Raises TrackingError if it cannot be reached."""
        self.uri = uri
        self.notes: list[str] = []
        """What the store did not take so far, as sentences without a full stop."""
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
            raise TrackingError(f"the MLflow store {uri} cannot be opened: {first_line(error)}") from error

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
        except SlurmtrainError:
            raise
        except Exception as error:  # MLflow's plugins and drivers raise anything, and other runs have other stores
            raise self._refused(run, error) from error

    def experiment_of(self, mlflow_id: str) -> tuple[str, str]:
        """The id and the name of the experiment that an MLflow run belongs to. Raises TrackingError."""
        try:
            experiment = self._client.get_run(mlflow_id).info.experiment_id
            return str(experiment), str(self._client.get_experiment(experiment).name)
        except Exception as error:  # as above
            raise TrackingError(
                f"the MLflow store {self.uri} does not show run {mlflow_id}: {first_line(error)}"
            ) from error

    def send(
        self, mlflow_id: str, run: Run, directory: RunDir, offsets: Mapping[str, int], refused: Sequence[str] = ()
    ) -> Sent:
        """Send what is new in a run. After a failure, what was sent stays, and sending it again adds nothing.

        Args:
            mlflow_id: The MLflow run that mirrors the run.
            run: The run.
            directory: Its directory.
            offsets: How far each metrics file was sent before, in bytes.
            refused: The names of metrics that the store does not take.

        Raises:
            TrackingError: The store cannot be reached, or takes nothing.
            RunUnreadable: The run's metrics cannot be read.
        """
        try:
            # Standard output is for slurmtrain's own data, whatever MLflow prints there.
            with contextlib.redirect_stdout(sys.stderr):
                self._tag(mlflow_id, run)
                sent = self._send_metrics(mlflow_id, directory, offsets, refused)
                self._set_status(mlflow_id, run)
        except SlurmtrainError:
            raise
        except Exception as error:  # as above
            raise self._refused(run, error) from error
        return sent

    def _refused(self, run: Run, error: Exception) -> TrackingError:
        return TrackingError(f"the MLflow store {self.uri} did not take run {run.id}: {first_line(error)}")

    def _find_or_create(self, run: Run, plan: Plan) -> str:
        experiment = self._experiment(plan.spec.tracking.mlflow.experiment or run.name)
        existing = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.id}'", max_results=1)
        if existing:
            # Whoever created it may have been killed before all of them were sent.
            self._log_params(existing[0].info.run_id, plan.spec.params, existing[0].data.params)
            return str(existing[0].info.run_id)
        tags = {
            _RUN_TAG: run.id,
            "slurmtrain.plan_hash": run.plan_hash or "",
            "slurmtrain.dir": str(self._root.path / run.id),
        }
        tags.update({f"mlflow.source.git.{key}": str(value) for key, value in (run.git or {}).items()})
        created = self._client.create_run(
            experiment,
            start_time=_ms(run.submitted_at),
            tags={legal_name(name): value[:_TAG_LENGTH] for name, value in tags.items()},
            run_name=f"{run.name[:_NAME_LENGTH]}-{run.id}",
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

    def _log_params(self, mlflow_id: str, params: Mapping[str, Any], present: Collection[str] = ()) -> None:
        """Send the params of a plan, but for those that are ``present``: MLflow never changes one."""
        from mlflow.entities import Param

        def log(entities: list[Param]) -> None:
            self._client.log_batch(mlflow_id, params=entities)

        sender: Sender[_Param] = Sender(
            lambda param, name: Param(name, param.value),
            log,
            self._failure,
            lambda: self._client.get_run(mlflow_id).data.params,
        )
        flat = [
            param for param in _flatten(params) if not {legal_name(param.name), flat_name(param.name)} & set(present)
        ]
        for start in range(0, len(flat), _PARAMS_A_CALL):
            sender.send(flat[start : start + _PARAMS_A_CALL])
        self.notes += [
            f"the MLflow store {self.uri} does not take the param {name!r}: {why}"
            for name, why in sender.refused.items()
        ]

    def _tag(self, mlflow_id: str, run: Run) -> None:
        from mlflow.entities import RunTag

        tags = {
            "slurmtrain.state": run.state,
            "slurmtrain.reason": run.reason,
            "slurmtrain.attempts": str(len(run.attempts)),
            "slurmtrain.lost_steps": str(run.lost_steps if run.lost_steps is not None else ""),
        }
        self._client.log_batch(mlflow_id, tags=[RunTag(key, value[:_TAG_LENGTH]) for key, value in tags.items()])

    def _send_metrics(
        self, mlflow_id: str, directory: RunDir, offsets: Mapping[str, int], refused: Sequence[str]
    ) -> Sent:
        from mlflow.entities import Metric

        def log(entities: list[Metric]) -> None:
            self._client.log_batch(mlflow_id, metrics=entities)

        def make(value: _Value, name: str) -> Metric:
            return Metric(name, value.value, value.at_ms, value.step)

        sender: Sender[_Value] = Sender(
            make,
            log,
            self._failure,
            lambda: self._client.get_run(mlflow_id).data.metrics,
            dict.fromkeys(refused, ""),
        )
        sent = dict(offsets)
        for file in journal_files(directory):
            if file.metrics_of is not None:
                for piece in read_pieces(file, sent.get(file.name, 0)):
                    values = list(_values(piece))
                    for start in range(0, len(values), _METRICS_A_CALL):
                        sender.send(values[start : start + _METRICS_A_CALL])
                    sent[file.name] = piece.reading.end
        self.notes += [
            f"the MLflow store {self.uri} does not take the metric {name!r} of run {directory.id}: {why}"
            for name, why in sender.refused.items()
            if name not in refused
        ]
        return Sent(sent, tuple(sender.refused))

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


class _Param(NamedTuple):
    """A param: its ``name``, and its ``value`` as text."""

    name: str
    value: str


class _Value(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``at_ms`` milliseconds after 1970."""

    name: str
    value: float
    at_ms: int
    step: int


def _values(piece: Piece) -> Iterator[_Value]:
    """The values of metrics in a piece of a metrics file."""
    for point in points_of(record for _, record in piece.reading.records):
        for name, value in point.metrics.items():
            # MLflow refuses times before 1970.
            yield _Value(name, float(value), max(0, int(point.time * 1000)), point.step)


def _flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[_Param]:
    """The params of sections and their subsections by dotted names."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield _Param(f"{prefix}{name}", str(value)[:_PARAM_LENGTH])


def _ms(time: float | None) -> int | None:
    return None if time is None else int(time * 1000)
