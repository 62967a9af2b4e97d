"""Runs in the form of the JSON contract, as shown in lists. :mod:`.run_details` has the rest."""

from __future__ import annotations

import glob
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.job_state import SUSPENDED
from slurmtrain.model.run.layout import GUESSED_METRICS, METRICS, RunDir
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.node_load import Idle
    from slurmtrain.model.run.run import Checkpoint
    from slurmtrain.registry.rows import Listed

# It stays as long as fields are only added, never changed (CONTRIBUTING.md).
SCHEMA = 1
# The rate is computed from the last lines of the metrics: this much of the file, in bytes.
_TAIL_BYTES = 16_384
# In these states no agent has noted at the end what the script of a run has saved.
_STILL_SAVING = frozenset({"running", "lost"})
# In these its job waits in a queue.
_QUEUED = ("pending", "requeued")


class RunRecord(Mapping[str, Any]):
    """RUN of the JSON contract. A field is computed when it is first read: a list filters and shows few of them.

    ``steps_per_second`` and ``eta_seconds``, which take reading a file, are null unless the run is training.
    """

    def __init__(self, workspace: Workspace, listed: Listed) -> None:
        self.workspace = workspace
        self.listed = listed
        self.directory = workspace.root.run(listed.id)
        self.measures: Mapping[str, Callable[[RunRecord], Any]] = {}
        """Further fields that can be read, such as ``min:loss`` and ``cost``, but do not belong to the JSON."""
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = (FIELDS.get(name) or _UNLISTED.get(name) or self.measures[name])(self)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in FIELDS or name in _UNLISTED or name in self.measures

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS)

    def __len__(self) -> int:
        return len(FIELDS)

    @cached_property
    def rate(self) -> float | None:
        """Steps per second, while it trains."""
        from slurmtrain.model.run.journal_lines import steps_per_second
        from slurmtrain.system.journal_files import last_points

        job_id = self.listed.job_id
        if not self._is_training or job_id is None:
            return None
        # Folders of earlier starts as well: their lines are few, and the last start may have none yet.
        folders = self.directory.attempts.glob(f"{glob.escape(job_id)}.*")
        name = GUESSED_METRICS if self.listed.row["metrics_from"] else METRICS
        if name == GUESSED_METRICS and self.listed.row["step"] is None:
            return None  # lines are counted
        return steps_per_second([point for folder in folders for point in last_points(folder / name, _TAIL_BYTES)])

    @cached_property
    def idleness(self) -> Idle | None:
        """Since when it has been idle, while it is said to run; None if it is not, or not for long."""
        from slurmtrain.model.diagnosis.node_load import SAID_AFTER_S
        from slurmtrain.ops.shared.node_use import idle_of

        if (
            not self._is_training
            or (idle := idle_of(self.directory, self.listed.job_id, self.listed.resources)) is None
        ):
            return None
        return idle if time.time() - idle.since >= SAID_AFTER_S else None

    @property
    def usage(self) -> dict[str, dict[str, Any]]:
        """How much it asked for and used, by resource: by reading all that its nodes have noted."""
        from slurmtrain.ops.shared.node_use import usage_by_resource

        run = self.workspace.store.load(self.listed.id)
        return {} if run is None else usage_by_resource(self.workspace, run, self.eta)

    @property
    def speed(self) -> dict[str, Any]:
        """How fast it was and how much it needed: by reading all that its ranks and nodes have noted."""
        from slurmtrain.ops.shared.run_measures import measures_json

        run = self.workspace.store.load(self.listed.id)
        return {} if run is None else measures_json(self.directory, run)

    @property
    def _is_training(self) -> bool:
        """Whether it runs, and its job is not suspended."""
        live = self.listed.live
        return self.listed.state == "running" and not (live is not None and live.state == SUSPENDED)

    @property
    def trackers(self) -> list[dict[str, Any]]:
        """What trackers have of it. ``behind``: how many of the newest steps each lacks; None: unknown."""
        newest = self.listed.row["step"]
        return [
            {
                **{name: row[name] for name in ("tracker", "remote_id", "step")},
                # Never negative: after a rollback a tracker may have later steps than the run.
                "behind": None if newest is None else max(0, newest - (row["step"] or 0)),
                "complete": row["revision"] == self.listed.revision,
                "refused": json.loads(row["refused"]),
                "problem": row["problem"],
                "since": iso(row["since"]),
            }
            for row in sorted(self.listed.trackers, key=lambda row: str(row["tracker"]))
        ]

    @property
    def reason(self) -> str:
        """What is known about the run and, if it has not begun to train, what Slurm says about its job.

        For a run that trains, this includes a problem with saving, and that it has been idle for long.
        """
        listed, reason, live = self.listed, self.listed.reason, self.listed.live
        if listed.row["deleted_at"] is not None:
            again = f"'slurmtrain delete {listed.id}' deletes the rest"
            rest = "" if listed.row["freed"] is not None else f" in part: {again}"
            return "; ".join(filter(None, (f"its files were deleted{rest}", reason)))
        if listed.state == "running":
            stopped = live.reason if live is not None and live.state == SUSPENDED else ""
            idle = self.idleness.describe() if self.idleness is not None else ""
            return "; ".join(filter(None, (stopped, reason, listed.row["save_problem"], idle)))
        if listed.state not in _QUEUED:
            return reason
        from slurmtrain.ops.shared.relatives import describe_waits

        if waits := describe_waits(self.workspace, listed):
            # It says more than Slurm's 'Dependency', and than an earlier start that came too soon.
            return waits
        if live is None:
            return reason
        starts = f"; estimated start {iso(live.starts_at)}" if live.starts_at and live.state == "PENDING" else ""
        scheduler = live.reason + (f" on {live.nodes}" if live.nodes else "") + starts
        return f"{reason}; {scheduler}" if reason else scheduler

    @property
    def pending(self) -> dict[str, Any] | None:
        """Why its job waits, and until when, if Slurm says so."""
        live = self.listed.live
        if live is None or self.listed.state not in _QUEUED:
            return None
        starts = live.starts_at if live.state == "PENDING" else None
        facts = {name: getattr(live, name) for name in ("state", "code", "reason")}
        return {**facts, "estimated_start": iso(starts), "priority": live.priority}

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint, as JSON."""
        newest = self.listed.checkpoint
        if self["state"] in _STILL_SAVING:
            from slurmtrain.ops.shared.readable_checkpoints import newest_own

            newest = newest_own(self.workspace, self.listed.id, newest)
        return checkpoint_json(self.directory, newest) if newest else None

    @property
    def eta(self) -> float | None:
        """The seconds until its last step at this rate; None if that is not known."""
        step, total = self.listed.row["step"], self.listed.row["total_steps"]
        if not self.rate or step is None or total is None:
            return None
        return round(max(0, int(total) - int(step)) / self.rate, 1)


def _column(name: str) -> Callable[[RunRecord], Any]:
    return lambda run: run.listed.row[name]


def _iso_column(name: str) -> Callable[[RunRecord], str | None]:
    return lambda run: iso(run.listed.row[name])


FIELDS: Mapping[str, Callable[[RunRecord], Any]] = {
    "id": lambda run: run.listed.id,
    "name": lambda run: run.listed.name,
    "state": lambda run: run.listed.state,
    "reason": lambda run: run.reason,
    "executor": lambda run: run.listed.row["executor"] or None,
    "job_id": lambda run: run.listed.job_id,
    "attempt": lambda run: run.listed.attempt,
    "step": _column("step"),
    "total_steps": _column("total_steps"),
    "metrics": lambda run: {name: _finite_or_none(value) for name, value in run.listed.metrics.items()},
    "metrics_from": _column("metrics_from"),
    "submitted_at": _iso_column("submitted_at"),
    "started_at": _iso_column("started_at"),
    "ended_at": _iso_column("ended_at"),
    "checkpoint": lambda run: run.checkpoint,
    "params": lambda run: run.listed.params,
    "command": _column("command"),
    "resources": lambda run: run.listed.resources,
    "sweep": lambda run: run.listed.sweep,
    "parents": lambda run: run.listed.parents,
    "tags": lambda run: run.listed.tags,
    "note": _column("note"),
    "archived": lambda run: bool(run.listed.row["archived"]),
    "deleted_at": _iso_column("deleted_at"),
    "cause": _column("cause"),
    "nodes": lambda run: run.listed.nodes,
    "lost_steps": _column("lost_steps"),
    "goodput": lambda run: _rounded(run.listed.row["goodput"]),
    "mlflow_run_id": _column("mlflow_run_id"),
    "mirrored": lambda run: run.listed.mirrored,
    "trackers": lambda run: run.trackers,
    "dir": lambda run: str(run.directory.path),
    "plan_hash": _column("plan_hash"),
    "git": lambda run: run.listed.git,
    "pending": lambda run: run.pending,
    "idle": lambda run: run.idleness.to_dict() if run.idleness is not None else None,
    "steps_per_second": lambda run: _rounded(run.rate or None),
    "eta_seconds": lambda run: run.eta,
}


# Too much to read for each run of a list that does not ask for it.
_UNLISTED: Mapping[str, Callable[[RunRecord], Any]] = {
    "usage": lambda run: run.usage,
    "measures": lambda run: run.speed,
}


def run_json(workspace: Workspace, listed: Listed) -> dict[str, Any]:
    """RUN of the JSON contract, as JSON can be written."""
    return dict(RunRecord(workspace, listed))


def checkpoint_json(directory: RunDir, checkpoint: Checkpoint) -> dict[str, Any]:
    """CHECKPOINT of the JSON contract."""
    return {
        "step": checkpoint.step,
        "step_from": checkpoint.step_from,
        "path": str(directory.path / checkpoint.path),
        "bytes": checkpoint.bytes,
        "complete": checkpoint.complete,
        "verified": checkpoint.verified,
        "saved_at": iso(checkpoint.saved_at),
        "seconds": checkpoint.seconds,
        "stall_s": checkpoint.stall_s,
        "why": checkpoint.why,
        "metrics": {name: _finite_or_none(value) for name, value in checkpoint.metrics.items()},
        "attempt": checkpoint.attempt,
        "format": checkpoint.format,
        "pruned_at": iso(checkpoint.pruned_at),
    }


def runs_json(workspace: Workspace, runs: Mapping[str, Listed]) -> dict[str, Any]:
    """What ``submit``, ``resume`` and ``status`` print, except ``as_of``."""
    return {"schema": SCHEMA, "runs": [run_json(workspace, listed) for listed in runs.values()]}


def now_iso() -> str:
    """The current time."""
    return str(iso(time.time()))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _finite_or_none(value: Any) -> Any:
    # JSON has neither NaN nor infinities.
    return None if isinstance(value, float) and not math.isfinite(value) else value
