"""``slurmtrain cancel``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("cancel", short_help="Cancel runs.")
@options.runs_argument
@click.option("--force", is_flag=True, help="Kill immediately, without letting the run save.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, names: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Cancel each RUN: let it save and exit, and kill processes that do not exit.

    Works from any terminal of the machine; for Slurm jobs, from any machine of the cluster.
    """
    from slurmtrain.ops.cancel import cancel
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    run_ids, before = find(workspace, names, ask_slurm=False)
    over = {run_id for run_id in run_ids if before.runs[run_id].ended}
    ended = cancel(workspace, run_ids, force=force)
    if as_json:
        runs = observe(workspace, run_ids, ask_slurm=False).runs
        output.print_json(runs_json(workspace, {run_id: runs[run_id] for run_id in run_ids}))
    for run_id, run in ended.items():
        if run_id in over:
            click.echo(f"run {run_id} had ended already: {run.state}", err=True)
        else:
            click.echo(
                f"run {run_id} is {run.state}" + (f": {run.reason}" if run.reason not in ("", run.state) else ""),
                err=True,
            )
    return 0 if all(run.ended for run in ended.values()) else 1
