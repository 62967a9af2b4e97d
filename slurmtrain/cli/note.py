"""``slurmtrain note``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "note", short_help="Write a note on a run.", epilog=options.examples("note @last the learning rate is too high")
)
@options.run_argument
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@options.json_option
@options.in_workspace
@options.looks
def command(workspace: Workspace, run: str, words: tuple[str, ...], as_json: bool) -> int:
    """Write TEXT on RUN, in place of its note; without TEXT, print the note.

    'slurmtrain show' prints it, too. An empty TEXT ('') removes it.
    """
    from slurmtrain.ops.marks import write_note
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    text = " ".join(words)
    if words:
        run_id = write_note(workspace, run, text)
    else:
        [run_id], _ = find(workspace, [run], ask_slurm=False)
    if words and not as_json:
        output.echo(f"{'wrote the note' if text else 'removed the note'} on run {run_id}", err=True)
        return 0
    listed = observe(workspace, [run_id], ask_slurm=False).runs[run_id]
    if as_json:
        output.print_json(runs_json(workspace, {run_id: listed}))
    elif listed.row["note"]:
        output.verbatim(str(listed.row["note"]))
    return 0
