"""Waiting for runs from a command: progress while they run, their outcome as the exit code."""

from __future__ import annotations

from collections.abc import Sequence

from slurmtrain.cli.shared import output
from slurmtrain.cli.shared.progress import run_progress
from slurmtrain.cli.shared.run_table import print_runs
from slurmtrain.ops.shared.views import run_json, runs_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.wait import wait


def wait_for_runs(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool) -> int:
    """Wait for runs to end, and print how they ended.

    Args:
        workspace: where the runs are.
        run_ids: the runs to wait for.
        as_json: print JSON rather than a table.

    Returns:
        The exit code: 0 if all runs completed, else 1.
    """
    workspace = workspace.looking_again()
    try:
        with run_progress(workspace) as show:
            completed, synced = wait(workspace, run_ids, show)
    except KeyboardInterrupt:
        output.echo(f"no longer waiting; the run continues ('slurmtrain cancel {run_ids[-1]}' ends it)", err=True)
        raise
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    chosen = {run_id: synced.observed.runs[run_id] for run_id in [*run_ids, *synced.searched]}
    if as_json:
        output.print_json(runs_json(workspace, chosen))
    else:
        print_runs([run_json(workspace, listed) for listed in chosen.values()])
    return 0 if completed else 1
