"""``slurmtrain wait``."""

from __future__ import annotations

import click

from slurmtrain.cli import common
from slurmtrain.ops.shared.workspace import Workspace


@click.command("wait", short_help="Wait until runs have ended.")
@common.runs_argument
@common.json_option
@common.in_workspace
def command(workspace: Workspace, names: tuple[str, ...], as_json: bool) -> int:
    """Wait until each RUN has ended. Exits with 0 if all completed, else with 1."""
    from slurmtrain.cli.waiting import wait_and_tell
    from slurmtrain.ops.shared.find import find

    run_ids, _ = find(workspace, names, ask_slurm=False)
    return wait_and_tell(workspace, run_ids, as_json=as_json)
