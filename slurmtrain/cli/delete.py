"""``slurmtrain delete``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import formatting, options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.deletion.delete import Deletable, Deleted

# How many runs are listed before you are asked.
_LISTED = 20


@click.command(
    "delete",
    short_help="Delete the files of runs.",
    epilog=options.examples("delete 'test-*'", "delete @last --forget"),
)
@options.runs_argument
@click.option("--forget", is_flag=True, help="Remove the whole directory, and the run from all lists.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, names: tuple[str, ...], forget: bool, yes: bool, as_json: bool) -> int:
    """Delete the checkpoints, logs and other files of each RUN, which must have ended.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. Its journals, metrics and plans stay, and its line in 'status'.
    What was written of it for CSV, TensorBoard and W&B goes, too. What its script wrote elsewhere stays, and so does
    what servers have. Exits with 1 if something could not be deleted.
    """
    from slurmtrain.ops.deletion.delete import delete, find_deletable

    runs = find_deletable(workspace, names, forget=forget)
    if runs and not yes:
        _confirm(runs, forget=forget)
    deleted = delete(workspace, runs, forget=forget)
    output.warn(deleted.problems)
    if as_json:
        output.print_json(_as_json(deleted, runs, forget=forget))
    else:
        _print(deleted, runs, forget=forget)
    return 1 if deleted.problems else 0


def _confirm(runs: Mapping[str, Deletable], *, forget: bool) -> None:
    """Ask on a terminal. Raises click.Abort if the answer is no, and UserError where nobody can be asked."""
    from slurmtrain.errors import UserError

    size = formatting.size(sum(run.removal.bytes for run in runs.values()))
    trackers = sorted({name for run in runs.values() for name in run.removal.trackers})
    also = f" and what was written for {', '.join(trackers)}" if trackers else ""
    results = sum(run.results for run in runs.values())
    written = f", of which scripts wrote {formatting.size(results)} next to their code" if results else ""
    target = f"{'everything' if forget else 'the files'} of {len(runs)} run(s){also}, {size}{written}"
    if not _can_ask():
        raise UserError(f"this deletes {target}; where there is no terminal to ask, that needs -y; nothing was deleted")
    for run_id, run in list(runs.items())[:_LISTED]:
        freed = formatting.size(run.removal.bytes)
        output.echo(f"{run_id}  {run.listed.name}  {run.listed.state}  {freed}", err=True)
    if len(runs) > _LISTED:
        output.echo(f"and {len(runs) - _LISTED} more", err=True)
    if not output.confirm(f"delete {target}?"):
        raise click.Abort


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _print(deleted: Deleted, runs: Mapping[str, Deletable], *, forget: bool) -> None:
    for run_id, removal in deleted.removed.items():
        verb = "is forgotten" if forget else "is deleted"
        output.echo(f"run {run_id} {verb}: {formatting.size(removal.bytes)} freed", err=True)
        for step, forks in runs[run_id].forks.items():
            for fork in forks:
                output.echo(f"run {fork} began with its step {step}, and keeps its own copy", err=True)
        for link in removal.links:
            output.echo(f"{link} was a link: what it pointed to stays", err=True)
    if not deleted.removed and not deleted.problems:
        output.echo("nothing to delete: their files are deleted already", err=True)


def _as_json(deleted: Deleted, runs: Mapping[str, Deletable], *, forget: bool) -> dict[str, Any]:
    removed = [
        {
            "id": run_id,
            "forgotten": forget,
            "bytes": removal.bytes,
            "links": removal.links,
            "trackers": removal.trackers,
            "forks": [fork for forks in runs[run_id].forks.values() for fork in forks],
        }
        for run_id, removal in deleted.removed.items()
    ]
    return {"schema": 1, "runs": removed, "bytes": deleted.bytes, "problems": deleted.problems}
