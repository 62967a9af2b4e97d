"""``slurmtrain registry``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.group("registry", short_help="Manage the registry.", epilog=options.examples("registry rebuild"))
def command() -> None:
    """Manage the registry, a projection of the run directories that can be deleted and rebuilt."""


@command.command(
    "rebuild",
    short_help="Rebuild the registry from the run directories.",
    epilog=options.examples("registry rebuild"),
)
@options.json_option
@options.in_workspace
def rebuild(workspace: Workspace, as_json: bool) -> int:
    """Rebuild the registry from the run directories.

    A file that cannot be read is kept next to it as registry.db.old.
    """
    from slurmtrain.ops.rebuild import rebuild

    observed = rebuild(workspace)
    output.warn_about(observed)
    if as_json:
        output.print_json({"schema": 1, "runs": len(observed.runs), "registry": str(workspace.config.registry)})
    else:
        output.echo(f"{len(observed.runs)} runs in {workspace.config.registry}", err=True)
    return 0
