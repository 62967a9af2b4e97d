"""``slurmtrain clean``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.deletion.clean import Cleaned

# A century: longer than any file is old.
_LONGEST_S = 100 * 365 * 86400
_HEADERS = ("KIND", "COUNT", "SIZE", "WHAT")
_FLAGS = {
    "logs": "Logs of ranks, agents and jobs.",
    "jobs": "submitit's pickles and batch scripts.",
    "copies": "Runs' own copies of their code, in which scripts have changed nothing.",
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
        from slurmtrain.model.query.quantities import read_length

        seconds = read_length("0s" if value == "0" else str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a length of time; write 2w, 30d, 12h or 90m", param, ctx)
        return min(seconds, _LONGEST_S)


def _kind_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for kind, text in reversed(_FLAGS.items()):
        command = click.option(f"--{kind}", is_flag=True, help=text)(command)
    return command


@click.command(
    "clean",
    short_help="Remove what no run needs any more.",
    epilog=options.examples("clean --dry-run", "clean --logs --older-than 7d", "clean --aside -y"),
)
@_kind_options
@click.option(
    "--older-than", type=Age(), default="30d", show_default=True, metavar="TIME", help="How long ago runs ended."
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without it nothing is removed where there is no terminal.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, older_than: int, dry_run: bool, yes: bool, as_json: bool, **kinds: bool) -> int:
    """Remove logs and other files that are not needed any more. Prints what goes, and asks.

    Without options that name kinds, all kinds but --aside. Runs that have not ended are left alone, and so are the
    checkpoints, journals, metrics and plans of all runs: 'status' and 'show' say the same before and after. Exits with
    1 if something could not be removed.
    """
    from slurmtrain.ops.deletion.clean import KINDS, ON_REQUEST, find_removable, remove

    chosen = {kind for kind, is_chosen in kinds.items() if is_chosen} or KINDS.keys() - ON_REQUEST
    cleaned = find_removable(workspace, chosen, older_than)
    if not as_json:
        _print(cleaned)
    if cleaned.parts and not dry_run:
        if yes or (_can_ask() and _confirm(cleaned)):
            cleaned = remove(workspace, cleaned)
            output.note(f"{formatting.size(sum(cleaned.bytes.values()))} are free now")
        elif not _can_ask():
            output.note("nothing was removed: where there is no terminal to ask, that needs -y")
    output.warn(cleaned.problems)
    if as_json:
        output.print_json(cleaned.to_dict())
    return 1 if cleaned.problems else 0


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _confirm(cleaned: Cleaned) -> bool:
    """Ask on a terminal. Raises click.Abort if the answer is no."""
    if not output.confirm(f"remove {formatting.size(sum(cleaned.bytes.values()))}?"):
        raise click.Abort
    return True


def _print(cleaned: Cleaned) -> None:
    plain = cleaned.to_dict()
    if not plain["kinds"]:
        output.note("nothing to remove")
        return
    tables.print_table(
        _HEADERS,
        [(each["kind"], str(each["count"]), formatting.size(each["bytes"]), each["what"]) for each in plain["kinds"]],
    )
