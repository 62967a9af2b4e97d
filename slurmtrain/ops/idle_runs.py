"""Ending runs that have been idle for longer than their specs allow (``idle_after``), with a save, and for good."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError
from slurmtrain.model.diagnosis.idleness import Idle
from slurmtrain.model.interruption.outlook import format_span
from slurmtrain.model.run.job_state import SUSPENDED
from slurmtrain.model.run.run import Run
from slurmtrain.ops.cancel import finish_cancel, request_end
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.node_load import idle_of
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

IDLE_AFTER = "idle_after"
"""The key of specs that says how long a run may be idle."""


def end_idle(workspace: Workspace, runs: Mapping[str, Listed]) -> dict[str, str]:
    """End the runs among these that have been idle for too long, as ``cancel`` does; returns why, by id.

    Args:
        workspace: Where the runs are.
        runs: Runs that have not ended, as observed.

    Raises:
        SlurmtrainError, OSError: A request cannot be recorded, or Slurm does not answer.
    """
    ended: dict[str, str] = {}
    for run_id, listed in runs.items():
        is_suspended = listed.live is not None and listed.live.state == SUSPENDED
        if listed.state != "running" or is_suspended or listed.row["cancelled"]:
            continue
        # Before its plan is read: few runs are idle at all.
        idle = idle_of(workspace.root.run(run_id), listed.job_id, listed.resources)
        run = workspace.store.load(run_id) if idle is not None else None
        if idle is None or run is None or run.unreadable or (run.executor == "local" and not alive(run)):
            continue
        if why := _why_end(workspace, run, idle):
            request_end(workspace, run_id, why, IDLE_AFTER)
            ended[run_id] = why
    # After all requests, so that the runs end side by side.
    finish_cancel(workspace, list(ended))
    return ended


def _why_end(workspace: Workspace, run: Run, idle: Idle) -> str:
    """Why an idle run is to end, as a phrase; empty: it may go on."""
    with suppress(PathError):
        limit_s, idle_s = current_plan(workspace.root.run(run.id), run).spec.idle_after, time.time() - idle.since
        if limit_s is not None and idle_s >= limit_s:
            verb = "were idle" if idle.gpus > 1 else "was idle" if idle.gpus else "computed nothing"
            return f"{idle.subject} {verb} for {format_span(idle_s)} ({IDLE_AFTER}: {format_span(limit_s)})"
    return ""
