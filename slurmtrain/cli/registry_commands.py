"""``slurmtrain registry``."""

from __future__ import annotations

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.inherited import current_directory


@click.group(epilog=options.examples("registry rebuild"))
def registry() -> None:
    """Manage the registry, a projection of the run directories that can be deleted and rebuilt."""


@options.command("registry rebuild", group=registry, short_help="Rebuild the registry from the run directories.")
@options.json_option
def rebuild(workspace: Workspace, as_json: bool) -> int:
    """Rebuild the registry from the run directories.

    A damaged file is kept next to it as registry.db.damaged, and one that is not a registry as registry.db.old.
    """
    from slurmtrain.cli.progress_bars import count_progress
    from slurmtrain.ops.rebuild import rebuild

    with count_progress("runs") as show:
        observed = rebuild(workspace, show)
    output.warn_about(observed)
    if as_json:
        output.print_json({"schema": 1, "runs": len(observed.runs), "registry": str(workspace.config.registry)})
    else:
        output.echo(f"{len(observed.runs)} runs in {workspace.config.registry}", err=True)
    return 0


@options.command(
    "registry copy runs/registry.db postgresql+psycopg://me@db.site/runs",
    group=registry,
    short_help="Copy the registry to another database.",
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@options.json_option
def copy(workspace: Workspace, source: str, target: str, as_json: bool) -> int:
    """Copy a registry to another database, and compare both.

    FROM and TO are SQLite files or databases on a PostgreSQL server, as 'registry' in slurmtrain.yaml names them. TO
    gets all that FROM has, also what was sent to trackers, or nothing; it is refused if it has runs that FROM does not
    have. Set 'registry' to TO afterwards.
    """
    from slurmtrain.ops.copy_registry import copy_registry

    copied = copy_registry(workspace, source, target, current_directory())
    if as_json:
        output.print_json({"schema": 1, "from": copied.source, "to": copied.target, "rows": dict(copied.rows)})
    else:
        output.echo(f"{copied.rows['run']} runs copied to {copied.target}, {sum(copied.rows.values())} rows", err=True)
    return 0
