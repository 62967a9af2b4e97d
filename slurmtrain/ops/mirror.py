"""Sending runs to the tracking stores that their plans, or the configuration, name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slurmtrain.errors import TrackingError
from slurmtrain.model.state import Run
from slurmtrain.ops.observe import observe
from slurmtrain.ops.resume import current_plan
from slurmtrain.ops.workspace import Workspace
from slurmtrain.registry.store import Mirrored

if TYPE_CHECKING:
    from slurmtrain.tracking import Tracker


class Mirror:
    """One sync's dealings with tracking stores: each is opened once, and given up when it fails once."""

    def __init__(self, workspace: Workspace, known: Mapping[str, Mirrored]) -> None:
        self._workspace = workspace
        self._known = known
        self._trackers: dict[str, Tracker | TrackingError] = {}

    def send(self, run_id: str) -> bool:
        """Send what is new of a run and remember how far that went; False if its plan wants no such thing.

        Raises TrackingError.
        """
        workspace, directory = self._workspace, self._workspace.root.run(run_id)
        run = self._load(run_id)
        plan = current_plan(directory, run)
        if not plan.spec.tracking.mlflow.enabled:
            return False
        uri = plan.spec.tracking.mlflow.uri or workspace.config.mlflow_uri or workspace.root.mlflow_uri
        tracker = self._use(uri)
        known = self._known.get(run_id)
        same_store = known is not None and known.uri == uri
        mlflow_id = run.mlflow_run_id if same_store and run.mlflow_run_id else tracker.identify(run, plan)
        if mlflow_id != run.mlflow_run_id:
            with workspace.journal(directory, "sync") as journal:
                journal.write("mlflow", mlflow_run_id=mlflow_id, uri=uri)
        revision = observe(workspace, [run_id]).runs[run_id].revision
        sent = tracker.send(mlflow_id, self._load(run_id), directory, known.offsets if known and same_store else {})
        with workspace.store.begin() as writing:
            writing.set_mirrored(run_id, Mirrored(uri, sent, revision))
        return True

    def _load(self, run_id: str) -> Run:
        run = self._workspace.store.load(run_id)
        assert run is not None
        return run

    def _use(self, uri: str) -> Tracker:
        from slurmtrain.tracking import Tracker

        if uri not in self._trackers:
            try:
                self._trackers[uri] = Tracker(uri, self._workspace.root)
            except TrackingError as error:
                self._trackers[uri] = error
        tracker = self._trackers[uri]
        if isinstance(tracker, TrackingError):
            raise tracker
        return tracker
