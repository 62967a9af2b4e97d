"""``slurmtrain tag``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command("tag", short_help="Tag runs.", epilog=options.examples("tag 'cnn-*' good"))
@options.runs_and_tag_argument
@click.option("--remove", is_flag=True, help="Remove the tag.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, words: tuple[str, ...], remove: bool, as_json: bool) -> int:
    """Tag each RUN with TAG, a word such as 'good'.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. With a RUN alone, its tags are printed.
    """
    from slurmtrain.ops.marks import add_tag, remove_tag
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.views import runs_json

    *names, tag = words
    if names:
        runs = (remove_tag if remove else add_tag)(workspace, names, tag)
    else:
        [run_id], observed = find(workspace, [tag], ask_slurm=False)
        runs = observed.runs.fetch([run_id])
    if as_json:
        output.print_json(runs_json(workspace, runs))
    elif names:
        output.echo(f"{'removed' if remove else 'added'} tag {tag}: {', '.join(runs)}", err=True)
    else:
        for listed in runs.values():
            for each in listed.tags:
                output.echo(each)
    return 0
