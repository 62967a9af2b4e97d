"""Runs in the form of the JSON contract, as shown in lists. :mod:`.run_details` has the rest."""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from slurmtrain.model.run.layout import METRICS, RunDir
from slurmtrain.model.run.run import Checkpoint
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.store import Listed

SCHEMA = 1
# The rate is computed from the last lines of the metrics: this much of the file, in bytes.
_TAIL_BYTES = 16_384


def iso(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond; None for one that no calendar has."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def run_json(workspace: Workspace, listed: Listed) -> dict[str, Any]:
    """RUN of the JSON contract. ``steps_per_second`` and ``eta_seconds`` are null unless the run is training."""
    row, directory = listed.row, workspace.root.run(listed.id)
    rate = _rate(directory, listed) if listed.state == "running" else None
    return {
        "id": listed.id,
        "name": listed.name,
        "state": listed.state,
        "reason": _reason(listed),
        "executor": row["executor"] or None,
        "job_id": listed.job_id,
        "attempt": listed.attempt,
        "step": row["step"],
        "total_steps": row["total_steps"],
        "metrics": {name: _finite(value) for name, value in listed.metrics.items()},
        "submitted_at": iso(row["submitted_at"]),
        "started_at": iso(row["started_at"]),
        "ended_at": iso(row["ended_at"]),
        "checkpoint": checkpoint_json(directory, listed.checkpoint) if listed.checkpoint else None,
        "params": listed.params,
        "command": row["command"],
        "resources": listed.resources,
        "sweep": listed.sweep,
        "tags": listed.tags,
        "note": row["note"],
        "archived": bool(row["archived"]),
        "deleted_at": iso(row["deleted_at"]),
        "cause": row["cause"],
        "nodes": listed.nodes,
        "lost_steps": row["lost_steps"],
        "goodput": None if row["goodput"] is None else round(row["goodput"], 4),
        "mlflow_run_id": row["mlflow_run_id"],
        "dir": str(directory.path),
        "plan_hash": row["plan_hash"],
        "git": listed.git,
        "pending": _pending(listed),
        "steps_per_second": round(rate, 4) if rate else None,
        "eta_seconds": _eta(row, rate),
    }


def _reason(listed: Listed) -> str:
    """What is known about the run and, if it has not begun to train, what Slurm says about its job.

    For a run that trains, this includes a problem with saving.
    """
    reason, live = listed.reason, listed.live
    if listed.state == "running":
        return "; ".join(filter(None, (reason, listed.row["save_problem"])))
    if live is None or listed.state not in ("pending", "requeued"):
        return reason
    starts = f"; estimated start {iso(live.starts_at)}" if live.starts_at and live.state == "PENDING" else ""
    scheduler = live.reason + (f" on {live.nodes}" if live.nodes else "") + starts
    return f"{reason}; {scheduler}" if reason else scheduler


def _pending(listed: Listed) -> dict[str, Any] | None:
    """Why a job waits, and until when, if Slurm says so."""
    live = listed.live
    if live is None or listed.state not in ("pending", "requeued"):
        return None
    return {
        "state": live.state,
        "code": live.code,
        "reason": live.reason,
        "estimated_start": iso(live.starts_at) if live.state == "PENDING" else None,
        "priority": live.priority,
    }


def checkpoint_json(directory: RunDir, checkpoint: Checkpoint) -> dict[str, Any]:
    """CHECKPOINT of the JSON contract."""
    return {
        "step": checkpoint.step,
        "path": str(directory.path / checkpoint.path),
        "bytes": checkpoint.bytes,
        "complete": checkpoint.complete,
        "verified": checkpoint.verified,
        "saved_at": iso(checkpoint.saved_at),
        "seconds": checkpoint.seconds,
        "stall_s": checkpoint.stall_s,
        "why": checkpoint.why,
        "metrics": {name: _finite(value) for name, value in checkpoint.metrics.items()},
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


def _rate(directory: RunDir, listed: Listed) -> float | None:
    """Steps per second of the newest job, from the last lines of its metrics."""
    from slurmtrain.model.run.progress import steps_per_second
    from slurmtrain.system.journal_files import last_points

    if listed.job_id is None:
        return None
    # Those of earlier starts as well: their lines are few, and the last start may have none yet.
    folders = directory.attempts.glob(f"{glob.escape(listed.job_id)}.*")
    return steps_per_second([point for folder in folders for point in last_points(folder / METRICS, _TAIL_BYTES)])


def _eta(row: Mapping[str, Any], rate: float | None) -> float | None:
    if not rate or row["step"] is None or row["total_steps"] is None:
        return None
    return round(max(0, int(row["total_steps"]) - int(row["step"])) / rate, 1)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
