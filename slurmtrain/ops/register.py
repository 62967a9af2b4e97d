"""Exporting a model and registering it in MLflow's model registry."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import CheckpointError, UserError
from slurmtrain.ops.export import Exported, ExportRequest, export
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.trackers import MLFLOW, targets_of
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import ShowProgress
from slurmtrain.runtime.checkpoint.checkpoint_files import new_hasher, read_manifest
from slurmtrain.system.locks import locked

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Registered:
    """A version of a model in the registry of an MLflow ``store``, with the file that was ``exported``."""

    exported: Exported
    name: str
    version: str
    store: str

    @property
    def uri(self) -> str:
        """Its URI for MLflow's tools."""
        return f"models:/{self.name}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        """What ``export --register --json`` prints."""
        registered = {"name": self.name, "version": self.version, "uri": self.uri, "store": self.store}
        return {**self.exported.to_dict(), "registered": registered}


def export_registered(
    workspace: Workspace, run_id: str, request: ExportRequest, name: str, show: ShowProgress = lambda *_: None
) -> Registered:
    """Export a model, and register the file in the MLflow store of its run.

    Args:
        workspace: Where the run is.
        run_id: The run.
        request: What to export, and where to.
        name: The name of the model in the registry.
        show: Called with the progress of verifying.

    Raises:
        UserError: The run is not shown in MLflow, or the request cannot be met.
        CheckpointError: As :func:`slurmtrain.ops.export.export` does.
        TrackingError: The store cannot be reached, or takes no models.
        LockHeld: Another command sends for too long.
    """
    from slurmtrain.ops.shared.mirroring import RunSender, Trackers
    from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker

    run = observe_run(workspace, run_id, ask_slurm=False)
    plan = current_plan(workspace.root.run(run_id), run)
    target = next((target for target in targets_of(workspace, plan) if target.name == MLFLOW), None)
    if target is None:
        raise UserError(f"run {run_id} is not shown in MLflow (tracking.mlflow.enabled is false in its spec)")
    tracker = Trackers(workspace).open(target)
    assert isinstance(tracker, MlflowTracker)
    # Before a model is exported, which may take long.
    with locked(workspace.root.tracking_lock):
        mlflow_id = RunSender(workspace, run_id, plan).begin(tracker, target.name)
    tracker.ensure_model(name)
    exported = export(workspace, run_id, request, show)
    tags = {
        "slurmtrain.run_id": run_id,
        "slurmtrain.step": str(exported.step),
        "slurmtrain.object": exported.object,
        "slurmtrain.checkpoint": str(exported.checkpoint),
        "slurmtrain.format": exported.to.suffix,
        "slurmtrain.hash": f"xxh3_128:{_hash(exported)}",
    }
    return Registered(exported, name, tracker.register(mlflow_id, exported.to, name, tags), tracker.uri)


def _hash(exported: Exported) -> str:
    """The hash of the checkpoint, in its manifest; of the file itself if a script has saved the checkpoint."""
    with contextlib.suppress(CheckpointError):
        return str(read_manifest(exported.checkpoint).to_json()["xxh3_128"])
    hasher = new_hasher()
    with exported.to.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
