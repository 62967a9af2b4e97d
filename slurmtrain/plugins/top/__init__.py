"""``slurmtrain top``. textual is imported only once a terminal is known to be there."""

from __future__ import annotations

import sys

from slurmtrain.cli import options, output
from slurmtrain.errors import UserError
from slurmtrain.ops.shared.workspace import Workspace


@options.command("top", looks=True)
@options.interval_option
def top_command(workspace: Workspace, interval: float) -> int:
    """Show all runs on a live page: steps, rates, why they wait or ended, and the end of their logs.

    Keys follow logs, show all about a run, cancel it, resume it, have it save, filter and sort; ? lists them. It needs
    a terminal; 'slurmtrain status --watch' and 'slurmtrain status --json' do not.
    """
    # textual draws on standard error, and reads keys from standard input.
    if not all(stream.isatty() and output.is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(
            "'slurmtrain top' needs a terminal for input and output; 'slurmtrain status --watch' prints the runs again "
            "and again, 'slurmtrain status --json' prints them for programs"
        )
    from slurmtrain.plugins.top.app import run_top

    return run_top(workspace, interval)
