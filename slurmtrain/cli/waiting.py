"""Waiting for runs from a command: progress while they run, their outcome as the exit code."""

from __future__ import annotations

from collections.abc import Sequence

import click

from slurmtrain.cli.common import print_json, warn, warn_of
from slurmtrain.cli.progress import teller
from slurmtrain.cli.text import HEADERS, print_table, row
from slurmtrain.ops.shared.views import run_json, runs_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.wait import wait


def wait_and_tell(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool) -> int:
    """Wait for runs to end and print what they are then; returns 0 if all completed, else 1."""
    workspace = workspace.looking_again()
    try:
        with teller(workspace) as tell:
            completed, synced = wait(workspace, run_ids, tell)
    except KeyboardInterrupt:
        click.echo(f"no longer waiting; what runs goes on ('slurmtrain cancel {run_ids[-1]}' ends it)", err=True)
        raise
    warn_of(synced.observed)
    warn([*synced.notes, *synced.problems])
    chosen = {run_id: synced.observed.runs[run_id] for run_id in run_ids}
    if as_json:
        print_json(runs_json(workspace, chosen))
    else:
        print_table(HEADERS, [row(run_json(workspace, listed)) for listed in chosen.values()])
    return 0 if completed else 1
