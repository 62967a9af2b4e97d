"""``slurmtrain wait``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options
from slurmtrain.ops.shared.workspace import Workspace


@click.command("wait", short_help="Wait until runs have ended.", epilog=options.examples("wait digits cnn"))
@options.runs_argument
@options.json_option
@options.in_workspace
def command(workspace: Workspace, names: tuple[str, ...], as_json: bool) -> int:
    """Wait until each RUN has ended. Exits with 0 if all completed, else with 1."""
    from slurmtrain.cli.shared.wait_for_runs import wait_for_runs
    from slurmtrain.ops.shared.find import find_all

    run_ids, _ = find_all(workspace, names)
    return wait_for_runs(workspace, run_ids, as_json=as_json)
