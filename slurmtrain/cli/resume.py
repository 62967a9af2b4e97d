"""``slurmtrain resume``."""

from __future__ import annotations

import click

from slurmtrain.cli import common
from slurmtrain.ops.shared.workspace import Workspace


@click.command("resume", short_help="Start a run again, from its newest checkpoint.")
@common.run_argument
@common.overrides_argument
@click.option("--from-start", is_flag=True, help="Put the run's checkpoints aside and begin again.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the run has ended; exit with its outcome.")
@common.json_option
@common.in_workspace
def command(
    workspace: Workspace, run: str, overrides: tuple[str, ...], from_start: bool, waits: bool, as_json: bool
) -> int:
    """Start a new attempt of RUN from its newest complete checkpoint.

    KEY=VALUE overrides, such as params.steps=4000 or resources.time=02:00:00, hold for this and later attempts.
    """
    from slurmtrain.ops.resume import resume
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    run_id, notes = resume(workspace, run, overrides, from_start=from_start)
    common.warn(notes)
    if waits:
        from slurmtrain.cli.waiting import wait_and_tell

        return wait_and_tell(workspace, [run_id], as_json=as_json)
    runs = observe(workspace, [run_id], ask_slurm=False).runs
    if as_json:
        common.print_json(runs_json(workspace, {run_id: runs[run_id]}))
    else:
        click.echo(run_id)
    return 0
