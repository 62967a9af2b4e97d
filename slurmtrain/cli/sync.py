"""``slurmtrain sync``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("sync", short_help="Reconcile runs, registry and MLflow.", epilog=options.examples("sync"))
@options.json_option
@options.in_workspace
def command(workspace: Workspace, as_json: bool) -> int:
    """Read new events, complete what a killed command left unfinished, restart runs, and mirror them to MLflow.

    Repeating it is harmless. Exits with 1 if something could not be done; the next sync tries again.
    """
    from slurmtrain.ops.sync import sync

    synced = sync(workspace)
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    actions = {
        "started": synced.started,
        "released": synced.released,
        "cancelled": synced.cancelled,
        "ended": synced.ended,
        "mirrored": synced.mirrored,
    }
    if as_json:
        output.print_json({"schema": 1, "runs": len(synced.observed.runs), **actions, "problems": synced.problems})
    else:
        counts = [f"{len(ids)} {action}" for action, ids in actions.items() if ids]
        output.echo(
            f"{len(synced.observed.runs)} runs" + (f": {', '.join(counts)}" if counts else "; nothing to do"), err=True
        )
    return 1 if synced.problems else 0
