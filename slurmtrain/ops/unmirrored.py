"""Runs of which MLflow does not have all metrics yet: commands that only read say so."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from slurmtrain.ops.shared.workspace import Workspace

# Who has sent something less than this long ago, such as a watch with its usual pause, is about to send again.
_SENDING_S = 120.0
_CURES = "'slurmtrain sync' sends them, 'slurmtrain ui' also shows them"


def describe_unmirrored(workspace: Workspace, runs: Iterable[Mapping[str, Any]]) -> str:
    """Of how many of these runs MLflow lacks metrics, and what sends them; empty if nothing need be said.

    Nothing need be said while another command sends them every so often. ``runs``: RUN of the JSON contract each.
    """
    behind = [str(run["id"]) for run in runs if run.get("mirrored") is False]
    unsent = workspace.store.unsent(behind) if behind and not _is_sending(workspace) else []
    if not unsent:
        return ""
    runs_text = f"run {unsent[0]}" if len(unsent) == 1 else f"{len(unsent)} runs"
    return f"metrics of {runs_text} are not in MLflow yet: {_CURES}"


def describe_next(workspace: Workspace, *, tracked: bool) -> str:
    """What sends the metrics of a run that was submitted just now; empty if a command does already, or none is to.

    Args:
        workspace: Where the run is.
        tracked: Whether its metrics are to be sent to MLflow.
    """
    return "" if not tracked or _is_sending(workspace) else f"metrics are not sent to MLflow by themselves: {_CURES}"


def _is_sending(workspace: Workspace) -> bool:
    """Whether some command has sent something a moment ago. It takes the lock for that, which writes to its file."""
    try:
        return abs(time.time() - workspace.root.tracking_lock.stat().st_mtime) < _SENDING_S
    except OSError:
        return False
