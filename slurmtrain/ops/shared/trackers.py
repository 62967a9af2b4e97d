"""Which trackers a run is sent to, with what settings, and how far they are behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
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
    from slurmtrain.tracking.tracker import check_tracker

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
    from slurmtrain.model.run.events.command_events import MlflowRunLinked

    with workspace.journal(workspace.root.run(run.id), "sync") as journal:
        journal.write(MlflowRunLinked(mlflow_run_id=remote_id, uri=uri))
    return True


# --- how far they are behind: commands that only read say so ----------------------------------------------------------

# Who has sent something less than this long ago, such as a watch with its usual pause, is about to send again.
_SENDING_S = 120.0
_SYNC = "'slurmtrain sync' sends them"
_UI = "'slurmtrain ui' also shows them"
_TITLES = {"mlflow": "MLflow", "wandb": "Weights & Biases", "tensorboard": "TensorBoard", "csv": "CSV"}


def describe_unmirrored(workspace: Workspace, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """What trackers lack of these runs, and what sends it; empty if nothing need be said.

    What is merely waiting need not be mentioned while another command, or the run itself, sends it every so often.

    Args:
        workspace: Where the runs are.
        runs: RUN of the JSON contract each.
    """
    behind = {str(run["id"]): run for run in runs if run.get("mirrored") is False}
    failing = {run_id for run_id, run in behind.items() if any(each["problem"] for each in run["trackers"])}
    by_tracker: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for run_id in (run_id for run_id in behind if run_id in failing):
        for each in behind[run_id]["trackers"]:
            if each["problem"]:
                by_tracker.setdefault(each["tracker"], []).append((run_id, each))
    notes = []
    for name, entries in by_tracker.items():
        steps = sum(each["behind"] or 0 for _, each in entries)
        since = min(str(each["since"]) for _, each in entries)
        lacks = f"{steps} {'step' if steps == 1 else 'steps'}" if steps else "what is new"
        runs_text = _these_runs([run_id for run_id, _ in entries])
        notes.append(f"{title_of([name])} lacks {lacks} of {runs_text} since {since}: {entries[0][1]['problem']}")
    waiting = [
        run_id for run_id in behind if run_id not in failing and not _is_recent(workspace.root.run(run_id).live_metrics)
    ]
    unsent = workspace.store.unsent(waiting) if waiting and not _is_sending(workspace) else []
    if unsent:
        names = sorted({each["tracker"] for run_id in unsent for each in behind[run_id]["trackers"]})
        where = f" to {title_of(names)}" if names else ""
        cures = f"{_SYNC}, {_UI}" if not names or "mlflow" in names else _SYNC
        notes.append(f"metrics of {_these_runs(unsent)} have not been sent{where} yet: {cures}")
    return notes


def describe_refused(run: Mapping[str, Any]) -> list[str]:
    """Which metrics of a run its trackers do not take. ``run``: RUN of the JSON contract."""
    return [
        f"{title_of([each['tracker']])} does not take {', '.join(map(repr, each['refused']))}"
        for each in run["trackers"]
        if each["refused"]
    ]


def describe_next(workspace: Workspace, plans: Iterable[Plan]) -> str:
    """What sends the metrics of runs that were submitted just now; empty if something does already, or nothing is to.

    Args:
        workspace: Where the runs are.
        plans: Theirs.
    """
    # A run sends to a server itself; if it could not, submit has said so.
    trackers = {
        name
        for plan in plans
        for name in plan.spec.tracking.trackers
        if name != MLFLOW or not mlflow_uri(workspace, plan).startswith(("http://", "https://"))
    }
    if not trackers or _is_sending(workspace):
        return ""
    cures = f"{_SYNC}, {_UI}" if "mlflow" in trackers else _SYNC
    return f"metrics are not sent to {title_of(sorted(trackers))} by themselves: {cures}"


def title_of(names: Iterable[str]) -> str:
    """What people call these trackers."""
    return ", ".join(_TITLES.get(name, name) for name in names)


def _these_runs(run_ids: Sequence[str]) -> str:
    return f"run {run_ids[0]}" if len(run_ids) == 1 else f"{len(run_ids)} runs"


def _is_sending(workspace: Workspace) -> bool:
    """Whether some command has sent something a moment ago. It takes the lock for that, which writes to its file."""
    return _is_recent(workspace.root.tracking_lock)


def _is_recent(path: Path) -> bool:
    try:
        # A file server's clock may be ahead of ours.
        return abs(time.time() - path.stat().st_mtime) < _SENDING_S
    except OSError:
        return False
