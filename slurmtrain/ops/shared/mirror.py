"""Sending runs to the tracking stores named by their plans or the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmtrain.errors import LockHeld, SlurmtrainError, TrackingError
from slurmtrain.model.run.events.command import MlflowRunLinked
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.current_plan import current_plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.store import Mirrored
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.registry.store import Listed
    from slurmtrain.tracking.tracker import Tracker


@dataclass(slots=True)
class MirrorOutcome:
    """What mirroring did: the runs of which something was sent, by id, what went wrong, and what stores refused."""

    mirrored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def mirror_runs(workspace: Workspace, runs: Mapping[str, Listed], *, wait: bool = True) -> MirrorOutcome:
    """Send what is new in these runs to their tracking stores. A store that is down is a problem, never a failure.

    Args:
        workspace: Where the runs are.
        runs: The runs by id, as just observed.
        wait: Wait while another command sends; otherwise nothing is sent meanwhile.
    """
    outcome = MirrorOutcome()
    if workspace.store.in_memory:  # it is unknown what was sent already
        return outcome
    mirrors = workspace.store.mirrors()
    waiting = [
        run_id
        for run_id, listed in runs.items()
        if listed.attempt and not listed.unreadable and listed.row["tracked"] is not False
        and (run_id not in mirrors or mirrors[run_id].revision != listed.revision)
        and workspace.root.run(run_id).path.exists()
    ]  # fmt: skip
    if not waiting:
        return outcome
    try:
        with locked(workspace.root.tracking_lock, wait=wait) as lock:
            if lock is not None:
                _send(Mirror(workspace, mirrors), waiting, outcome)
    except LockHeld as error:
        outcome.problems.append(f"nothing was sent to MLflow: {error}")
    return outcome


def _send(mirror: Mirror, run_ids: Sequence[str], outcome: MirrorOutcome) -> None:
    for run_id in run_ids:
        try:
            if mirror.send(run_id):
                outcome.mirrored.append(run_id)
        except TrackingError as error:
            # A store that is down is so for all runs.
            if str(error) not in outcome.problems:
                outcome.problems.append(str(error))
        except (SlurmtrainError, OSError) as error:
            outcome.problems.append(f"run {run_id} cannot be mirrored: {error}")
    outcome.notes += mirror.notes


def tracking_uri(workspace: Workspace, plan: Plan) -> str:
    """The MLflow store of a run: the plan's, the configured one, or the file next to the runs."""
    return plan.spec.tracking.mlflow.uri or workspace.config.mlflow_uri or workspace.root.mlflow_uri


def server_variables(workspace: Workspace, run_id: str, plan: Plan) -> dict[str, str]:
    """Variables with which a script reaches its own run on an MLflow server; none if the store is a file.

    Args:
        workspace: Where the run is.
        run_id: The run.
        plan: Its plan.

    Raises:
        TrackingError: The store is a server that does not answer.
    """
    uri = tracking_uri(workspace, plan)
    if not plan.spec.tracking.mlflow.enabled or not uri.startswith(("http://", "https://")):
        return {}
    observe(workspace, [run_id], ask_slurm=False)
    return {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": Mirror(workspace, {}).identify(run_id, plan, uri)}


class Mirror:
    """The tracking stores that one sync uses: each is opened once, and not used again after its first failure."""

    def __init__(self, workspace: Workspace, mirrored: Mapping[str, Mirrored]) -> None:
        """``mirrored``: what has been sent before, by run."""
        self._workspace = workspace
        self._mirrored = mirrored
        self._trackers: dict[str, Tracker | TrackingError] = {}

    def send(self, run_id: str) -> bool:
        """Send what is new in a run and record how far that went; False if its plan has tracking switched off.

        Raises TrackingError.
        """
        workspace, directory = self._workspace, self._workspace.root.run(run_id)
        plan = current_plan(directory, self._load(run_id))
        if not plan.spec.tracking.mlflow.enabled:
            return False
        uri = tracking_uri(workspace, plan)
        mlflow_id = self.identify(run_id, plan, uri)
        before = self._mirrored.get(run_id)
        # Read before anything is sent: what is added meanwhile is sent next time.
        revision = observe(workspace, [run_id], ask_slurm=False).runs[run_id].revision
        if before is None or before.uri != uri:
            before = Mirrored(uri, {}, 0)
        sent = self._use(uri).send(mlflow_id, self._load(run_id), directory, before.offsets, before.refused)
        mirrored = Mirrored(uri, sent.offsets, revision, sent.refused)
        workspace.store.write(lambda transaction: transaction.set_mirrored(run_id, mirrored))
        return True

    @property
    def notes(self) -> list[str]:
        """What the stores did not take, for the user."""
        trackers = [tracker for tracker in self._trackers.values() if not isinstance(tracker, TrackingError)]
        return [note for tracker in trackers for note in tracker.notes]

    def identify(self, run_id: str, plan: Plan, uri: str) -> str:
        """The id of the MLflow run that mirrors a run, created and journaled if it is new.

        Args:
            run_id: The run.
            plan: Its plan.
            uri: The MLflow store.

        Raises:
            TrackingError: The store cannot be reached, or refuses the request.
        """
        run = self._load(run_id)
        before = self._mirrored.get(run_id)
        if run.mlflow_run_id and before is not None and before.uri == uri:
            return run.mlflow_run_id
        mlflow_id = self._use(uri).identify(run, plan)
        if mlflow_id != run.mlflow_run_id:
            with self._workspace.journal(self._workspace.root.run(run_id), "sync") as journal:
                journal.write(MlflowRunLinked(mlflow_run_id=mlflow_id, uri=uri))
        return mlflow_id

    def _load(self, run_id: str) -> Run:
        run = self._workspace.store.load(run_id)
        assert run is not None
        return run

    def _use(self, uri: str) -> Tracker:
        from slurmtrain.tracking.tracker import Tracker

        if uri not in self._trackers:
            try:
                self._trackers[uri] = Tracker(uri, self._workspace.root)
            except TrackingError as error:
                self._trackers[uri] = error
        tracker = self._trackers[uri]
        if isinstance(tracker, TrackingError):
            raise tracker
        return tracker
