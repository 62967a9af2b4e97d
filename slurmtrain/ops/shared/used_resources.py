"""What a run asked for against what it used, from the files of its nodes and the times of its attempts."""

from __future__ import annotations

import time
from typing import Any

from slurmtrain.model.diagnosis.usage import Elapsed, Usage, judge_usage, use_of_node
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.node_load import load_files, read_load
from slurmtrain.ops.shared.workspace import Workspace


def usage_of(workspace: Workspace, run: Run, to_go: float | None) -> list[Usage]:
    """What a run asked for and used, an entry for each resource, also where nothing is known.

    Args:
        workspace: Where it is.
        run: The run.
        to_go: The seconds until its last step, while it trains; None: unknown.
    """
    directory = workspace.root.run(run.id)
    started = [attempt for attempt in run.attempts if attempt.started_at is not None]
    paths = [path for each in started for path in load_files(directory.attempt(each.job_id, each.restart))]
    now = time.time()
    spans = [
        max(0.0, (now if each.ended_at is None else each.ended_at) - each.started_at)
        for each in started
        if each.started_at is not None and (each.ended_at is not None or run.state == "running")
    ]
    elapsed = Elapsed(
        longest=round(max(spans), 1) if spans else None,
        total=sum(spans),
        to_go=to_go,
        is_completed=run.state == "completed",
        causes=[each.cause for each in started if each.cause is not None],
    )
    return judge_usage(run.resources, [use_of_node(read_load(path)) for path in paths], elapsed)


def usage_by_resource(workspace: Workspace, run: Run, to_go: float | None) -> dict[str, dict[str, Any]]:
    """The same by resource, so that columns and conditions can name a figure: ``usage.memory.used``.

    Args:
        workspace: Where it is.
        run: The run.
        to_go: As for :func:`usage_of`.
    """
    return {each.resource: each.to_dict() for each in usage_of(workspace, run, to_go)}
