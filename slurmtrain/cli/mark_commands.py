"""What people say about runs: ``tag``, ``note`` and ``archive``."""

from __future__ import annotations

import click

from slurmtrain.cli import complete, options, output
from slurmtrain.ops.shared.workspace import Workspace


@options.command("tag 'cnn-*' good", looks=True)
@click.argument("words", metavar="RUN... TAG", nargs=-1, required=True, shell_complete=complete.complete_run_or_tag)
@click.option("--remove", is_flag=True, help="Remove the tag.")
@options.json_option
def tag(workspace: Workspace, words: tuple[str, ...], remove: bool, as_json: bool) -> int:
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


@options.command("note @last the learning rate is too high", looks=True)
@options.run_argument
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@options.json_option
def note(workspace: Workspace, run: str, words: tuple[str, ...], as_json: bool) -> int:
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


@options.command("archive 'test-*'", looks=True)
@options.runs_argument
@click.option("--undo", is_flag=True, help="List them again.")
@options.json_option
def archive(workspace: Workspace, names: tuple[str, ...], undo: bool, as_json: bool) -> int:
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
