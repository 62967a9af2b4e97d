"""``slurmtrain prune``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.prune import Pruned

_HEADERS = ("STEP", "SIZE", "WHY", "PATH")


@click.command(
    "prune",
    short_help="Delete checkpoints that are not to be kept.",
    epilog=options.examples("prune digits --dry-run"),
)
@options.run_argument
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, run: str, dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints of RUN that checkpoint.keep of its spec does not keep, as the run does after each save.

    Works while the run trains. If it has ended, checkpoints that its attempts left half-written are deleted too. The
    newest checkpoint always stays. Exits with 1 if something could not be deleted.
    """
    from slurmtrain.ops.prune import prune
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    pruned = prune(workspace, run_id, dry=dry_run)
    output.warn(pruned.problems)
    if as_json:
        output.print_json(pruned.to_dict())
    else:
        _print(pruned)
    return 1 if pruned.problems else 0


def _print(pruned: Pruned) -> None:
    rows = [(str(each.step), formatting.size(each.bytes), each.why, str(each.path)) for each in pruned.checkpoints]
    for leftover in pruned.leftovers:
        why = "complete: published" if leftover.complete else "left by an attempt that died"
        rows.append(("-", formatting.size(leftover.bytes), why, str(leftover.path)))
    if rows:
        tables.print_table(_HEADERS, rows)
    for checkpoint in pruned.checkpoints:
        for fork in pruned.forks.get(checkpoint.step, ()):
            output.echo(f"run {fork} began with step {checkpoint.step}, and keeps its own copy", err=True)
    verb = "would be free" if pruned.dry else "are free now"
    summary = f"{formatting.size(pruned.bytes)} {verb}" if rows else "nothing to delete"
    output.echo(f"run {pruned.run.id}: {summary}", err=True)
