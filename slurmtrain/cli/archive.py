"""``slurmtrain archive``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("archive", short_help="Leave runs out of lists.", epilog=options.examples("archive 'test-*'"))
@options.runs_argument
@click.option("--undo", is_flag=True, help="List them again.")
@options.json_option
@options.in_workspace
@options.looks
def command(workspace: Workspace, names: tuple[str, ...], undo: bool, as_json: bool) -> int:
    """Leave each RUN out of 'status' once it has ended, unless it is named or --all is given.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. Nothing else changes; 'slurmtrain delete' frees space.
    """
    from slurmtrain.ops.marks import archive
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    run_ids = archive(workspace, names, undo=undo)
    if as_json:
        output.print_json(runs_json(workspace, observe(workspace, run_ids, ask_slurm=False).runs.fetch(run_ids)))
    else:
        output.echo(f"{'listed again' if undo else 'archived'}: {', '.join(run_ids)}", err=True)
    return 0
