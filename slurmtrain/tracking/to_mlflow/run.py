"""The MLflow run that shows a run: its params, its tags and its status, apart from metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan
from slurmtrain.tracking.to_mlflow.names import flat_name, legal_name
from slurmtrain.tracking.to_mlflow.sender import Sender

# MLflow's limits for one call and for one value.
_PARAMS_A_CALL = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 5000
_NAME_LENGTH = 200
_RUN_TAG = "slurmtrain.run_id"
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "lost": "FAILED", "cancelled": "KILLED"}


class MlflowRuns:
    """Runs in one MLflow store."""

    def __init__(self, client: Any, uri: str, root: RunsRoot, failure: tuple[type[Exception], ...]) -> None:
        """Use a store.

        Args:
            client: MLflow's client.
            uri: The store.
            root: The runs root.
            failure: What the client raises.
        """
        self._client = client
        self._uri = uri
        self._root = root
        self._failure = failure
        self.notes: list[str] = []
        """What the store did not take, as sentences."""

    def find_or_create(self, run: Run, plan: Plan) -> str:
        """The id of the MLflow run that shows a run, created if there is none."""
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

    def retire(self, mlflow_id: str) -> None:
        """Delete an MLflow run that shows what was rolled back. MLflow keeps it until its own garbage collection."""
        if self._client.get_run(mlflow_id).info.lifecycle_stage == "active":
            self._client.delete_run(mlflow_id)

    def tag(self, mlflow_id: str, run: Run) -> None:
        """Set the tags that change while a run goes on."""
        from mlflow.entities import RunTag

        tags = {
            "slurmtrain.state": run.state,
            "slurmtrain.reason": run.reason,
            "slurmtrain.attempts": str(len(run.attempts)),
            "slurmtrain.lost_steps": str(run.lost_steps if run.lost_steps is not None else ""),
        }
        self._client.log_batch(mlflow_id, tags=[RunTag(key, value[:_TAG_LENGTH]) for key, value in tags.items()])

    def set_status(self, mlflow_id: str, run: Run) -> None:
        """Set MLflow's status to that of the run."""
        if run.state in _STATUS:
            self._client.set_terminated(mlflow_id, _STATUS[run.state], _ms(run.ended_at))
        elif self._client.get_run(mlflow_id).info.status != "RUNNING":
            self._client.update_run(mlflow_id, status="RUNNING")

    def _experiment(self, name: str) -> str:
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        # Without an explicit location, a local store would put artifacts below the current directory.
        location = self._root.mlflow_artifacts.as_uri() if self._uri.startswith("sqlite:") else None
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
            f"the MLflow store {self._uri} does not take the param {name!r}: {why}"
            for name, why in sender.refused.items()
        ]


class _Param(NamedTuple):
    """A param: its ``name``, and its ``value`` as text."""

    name: str
    value: str


def _flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[_Param]:
    """The params of sections and their subsections by dotted names."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield _Param(f"{prefix}{name}", str(value)[:_PARAM_LENGTH])


def _ms(time: float | None) -> int | None:
    return None if time is None else int(time * 1000)
