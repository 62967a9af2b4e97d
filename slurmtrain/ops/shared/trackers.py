"""Which trackers a run is sent to, and with what settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.command_events import MlflowRunLinked
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.tracking.tracker import check_tracker

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

MLFLOW = "mlflow"


@dataclass(frozen=True, slots=True)
class Target:
    """A tracker, by its name, with its settings."""

    name: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The same for the same tracker with the same settings."""
        return json.dumps([self.name, self.settings], sort_keys=True)


def targets_of(workspace: Workspace, plan: Plan) -> Sequence[Target]:
    """The trackers that a run with this plan is sent to."""
    settings = {name: dict(each) for name, each in plan.spec.tracking.trackers.items()}
    if MLFLOW in settings:
        # Runs of all experiments of a store are sent through one connection.
        settings[MLFLOW] = {"uri": mlflow_uri(workspace, plan)}
    return [Target(name, each) for name, each in settings.items()]


def check_trackers(plans: Iterable[Plan]) -> None:
    """Check that the trackers of these plans are installed. Raises UserError."""
    for name in sorted({name for plan in plans for name in plan.spec.tracking.trackers}):
        check_tracker(name)


def mlflow_uri(workspace: Workspace, plan: Plan) -> str:
    """The MLflow store of a run: the plan's, the configured one, or the file next to the runs."""
    return plan.spec.tracking.mlflow.uri or workspace.config.mlflow_uri or workspace.root.mlflow_uri


def mlflow_server(workspace: Workspace, plan: Plan) -> str:
    """The URI of the server that shows a run; empty if its store is a file, or it has none."""
    uri = mlflow_uri(workspace, plan)
    return uri if plan.spec.tracking.mlflow.enabled and uri.startswith(("http://", "https://")) else ""


def link(workspace: Workspace, run: Run, name: str, remote_id: str, uri: str) -> bool:
    """Journal what a tracker calls a run, where others can use that; returns whether it was new.

    Args:
        workspace: Where the run is.
        run: The run.
        name: The tracker's name.
        remote_id: Its id of the run.
        uri: Where it keeps runs.
    """
    # Only MLflow's id is one of the run's own facts (mlflow_run_id); others' are kept with what was sent.
    if name != MLFLOW or remote_id == run.mlflow_run_id:
        return False
    with workspace.journal(workspace.root.run(run.id), "sync") as journal:
        journal.write(MlflowRunLinked(mlflow_run_id=remote_id, uri=uri))
    return True
