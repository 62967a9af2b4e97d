"""Freeing space: ``delete`` and ``clean``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.deletion.clean import Cleaned
    from slurmtrain.ops.deletion.delete import Deletable, Deleted


@options.command("delete 'test-*'", "delete @last --forget")
@options.runs_argument
@click.option("--forget", is_flag=True, help="Remove the whole directory, and the run from all lists.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@options.json_option
def delete(workspace: Workspace, names: tuple[str, ...], forget: bool, yes: bool, as_json: bool) -> int:
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
    written = f" ({formatting.size(results)} written by scripts next to their code)" if results else ""
    target = f"{'everything' if forget else 'the files'} of {len(runs)} run(s){also}, {size}{written}"
    if not output.can_ask():
        raise UserError(f"this deletes {target}; where there is no terminal to ask, that needs -y; nothing was deleted")
    lines = [
        f"{run_id}  {run.listed.name}  {run.listed.state}  {formatting.size(run.removal.bytes)}"
        for run_id, run in runs.items()
    ]
    output.require_consent(f"delete {target}?", lines)


def _print(deleted: Deleted, runs: Mapping[str, Deletable], *, forget: bool) -> None:
    for run_id, removal in deleted.removed.items():
        verb = "is forgotten" if forget else "is deleted"
        output.echo(f"run {run_id} {verb}: {formatting.size(removal.bytes)} freed", err=True)
        for step, forks in runs[run_id].forks.items():
            for fork in forks:
                output.echo(f"run {fork} began with its step {step}, and keeps its own copy", err=True)
        for link in removal.links:
            output.echo(f"{link} was a link: its target stays", err=True)
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


# A century: longer than any file is old.
_LONGEST_S = 100 * 365 * 86400
_FLAGS = {
    "logs": "Logs of ranks, agents and jobs.",
    "jobs": "submitit's pickles and batch scripts.",
    "copies": "Runs' own copies of their code, unless scripts have changed them.",
    "code": "Snapshots of code that no run's plan names.",
    "arrays": "What the elements of job arrays shared.",
    "caches": "Caches of runs that are gone.",
    "keys": "Idempotency keys.",
    "litter": "What killed commands have left.",
    "aside": "Checkpoints that 'resume --from-start' or '--step' has put aside: never removed without this option.",
}


class Age(click.ParamType[int]):
    """A time such as ``30d`` in seconds; ``0`` is one, too."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The seconds that ``value`` stands for; a usage error names ``param`` in ``ctx``."""
        from slurmtrain.model.query.fields import read_length

        seconds = read_length("0s" if value == "0" else str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a length of time; write 2w, 30d, 12h or 90m", param, ctx)
        return min(seconds, _LONGEST_S)


def _kind_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for kind, text in reversed(_FLAGS.items()):
        command = click.option(f"--{kind}", is_flag=True, help=text)(command)
    return command


@options.command("clean --dry-run", "clean --logs --older-than 7d", "clean --aside -y")
@_kind_options
@click.option(
    "--older-than", type=Age(), default="30d", show_default=True, metavar="TIME", help="How long ago runs ended."
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without it nothing is removed where there is no terminal.")
@options.json_option
def clean(workspace: Workspace, older_than: int, dry_run: bool, yes: bool, as_json: bool, **kinds: bool) -> int:
    """Remove logs and other files that are not needed any more. Prints what goes, and asks.

    Without options that name kinds, all kinds but --aside. Runs that have not ended are left alone, and so are the
    checkpoints, journals, metrics and plans of all runs: 'status' and 'show' say the same before and after. Exits with
    1 if something could not be removed.
    """
    from slurmtrain.ops.deletion.clean import KINDS, ON_REQUEST, find_removable, remove

    chosen = {kind for kind, is_chosen in kinds.items() if is_chosen} or KINDS.keys() - ON_REQUEST
    cleaned = find_removable(workspace, chosen, older_than)
    if not as_json:
        _print_removable(cleaned)
    if cleaned.parts and not dry_run:
        if not yes and output.can_ask():
            output.require_consent(f"remove {formatting.size(sum(cleaned.bytes.values()))}?")
        if yes or output.can_ask():
            cleaned = remove(workspace, cleaned)
            output.note(f"{formatting.size(sum(cleaned.bytes.values()))} are free now")
        else:
            output.note("nothing was removed: where there is no terminal to ask, that needs -y")
    output.warn(cleaned.problems)
    if as_json:
        output.print_json(cleaned.to_dict())
    return 1 if cleaned.problems else 0


def _print_removable(cleaned: Cleaned) -> None:
    plain = cleaned.to_dict()
    if not plain["kinds"]:
        output.note("nothing to remove")
        return
    tables.print_table(
        ("KIND", "COUNT", "SIZE", "WHAT"),
        [(each["kind"], str(each["count"]), formatting.size(each["bytes"]), each["what"]) for each in plain["kinds"]],
    )
