"""``slurmtrain logs``."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.logs import Choice


@options.command("logs @last -f", "logs digits -n 50 --rank 0", looks=True)
@options.run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run has ended; exit with its outcome.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log.")
@click.option(
    "--since", metavar="WHEN",
    help="Only lines written since 10m ago or 2026-11-22T10:30, to half a minute, of all attempts.",
)  # fmt: skip
@click.option("--grep", metavar="REGEX", help="Only lines that this regular expression matches anywhere.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--attempt", type=click.IntRange(min=1), help="This attempt; by default the newest.")
@click.option("--paths", is_flag=True, help="Print the paths of the logs instead.")
def logs(workspace: Workspace, run: str, follow: bool, paths: bool, **chosen: Any) -> int:
    """Print the output of the ranks of RUN. Each line begins with its attempt and rank, unless --rank selects one."""
    from slurmtrain.ops.logs import log_paths, read_logs
    from slurmtrain.ops.shared.find import find

    choice = _choice(**chosen)
    [run_id], _ = find(workspace, [run], ask_slurm=False)
    if paths:
        output.verbatim(*map(str, log_paths(workspace, run_id, choice)))
        return 0
    for line in read_logs(
        workspace, run_id, choice, follow=follow, waits=lambda reason: output.warn([f"run {run_id} waits: {reason}"])
    ):
        output.log_line("" if choice.rank is not None else f"[{line.attempt}/{line.origin}] ", line.text)
    if not follow:
        return 0
    _, observed = find(workspace, [run_id], ask_slurm=False)
    return 0 if observed.runs[run_id].state == "completed" else 1


def _choice(*, lines: int | None, since: str | None, grep: str | None, rank: int | None, attempt: int | None) -> Choice:
    """What the options choose. Raises UserError if ``since`` is no time, or ``grep`` no regular expression."""
    from slurmtrain.errors import UserError
    from slurmtrain.ops.logs import Choice

    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as error:
        raise UserError(f"--grep {grep!r} is not a regular expression: {error}") from error
    return Choice(rank=rank, attempt=attempt, newest=lines, pattern=pattern, since=_moment(since))


def _moment(text: str | None) -> float | None:
    """The time that a person has typed, in seconds since 1970. Raises UserError."""
    from slurmtrain.errors import UserError
    from slurmtrain.model.query.fields import read_span

    try:
        return None if text is None else read_span(text, time.time()).begin
    except ValueError as error:
        raise UserError(f"--since: {error}") from error
