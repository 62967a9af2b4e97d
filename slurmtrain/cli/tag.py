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
@options.looks
def command(workspace: Workspace, words: tuple[str, ...], remove: bool, as_json: bool) -> int:
    """Tag each RUN with TAG, a word such as 'good'.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. With a RUN alone, its tags are printed.
    """
    from slurmtrain.ops.marks import add_tag, remove_tag
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    *names, tag = words
    if names:
        run_ids = (remove_tag if remove else add_tag)(workspace, names, tag)
    else:
        run_ids, _ = find(workspace, [tag], ask_slurm=False)
    if names and not as_json:
        output.echo(f"{'removed' if remove else 'added'} tag {tag}: {', '.join(run_ids)}", err=True)
        return 0
    runs = observe(workspace, run_ids, ask_slurm=False).runs.fetch(run_ids)
    if as_json:
        output.print_json(runs_json(workspace, runs))
    for each in () if as_json else runs[run_ids[0]].tags:
        output.echo(each)
    return 0
