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
def command(workspace: Workspace, run: str, words: tuple[str, ...], as_json: bool) -> int:
    """Write TEXT on RUN, in place of its note; without TEXT, print the note.

    'slurmtrain show' prints it, too. An empty TEXT ('') removes it.
    """
    from slurmtrain.ops.marks import write_note
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.views import runs_json

    if words:
        listed = write_note(workspace, run, " ".join(words))
    else:
        [run_id], observed = find(workspace, [run], ask_slurm=False)
        listed = observed.runs[run_id]
    note = str(listed.row["note"])
    if as_json:
        output.print_json(runs_json(workspace, {listed.id: listed}))
    elif words:
        output.echo(f"{'wrote the note' if note else 'removed the note'} on run {listed.id}", err=True)
    elif note:
        output.echo(note)
    return 0
