"""``slurmtrain watch``."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import options, output, times
from slurmtrain.errors import OutputError
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.watch.lock import WatchHolder
    from slurmtrain.ops.watch.report import WatchEvent

_INTERRUPTED = 130


@click.command(
    "watch",
    short_help="Restart interrupted runs, until stopped.",
    epilog=options.examples("watch", "watch --once"),
)
@click.option(
    "--every",
    metavar="S",
    type=options.Seconds(10),
    default=60.0,
    show_default=True,
    help="Seconds between two rounds, at least 10.",
)
@click.option("--once", is_flag=True, help="Do a single round, as for cron; exit with 1 if something went wrong.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, every: float, once: bool, as_json: bool) -> int:
    """Repeat what sync does until SIGTERM or Ctrl-C: a process for a login node.

    It prints a line for each action and each problem, and when a problem is over. If another watch is running for these
    runs, it says which and exits with 0.
    """
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.ops.watch.loop import watch, watch_once

    problems: list[str] = []

    def report(event: WatchEvent) -> None:
        if once and event.kind == "problem":
            problems.append(event.message)
        _print(event, as_json=as_json)

    if once:
        _print_holder(workspace, watch_once(workspace.config, every, report))
        return 1 if problems else 0
    with StopSignal() as stop:
        _print_holder(workspace, watch(workspace.config, every, report, stop))
        return _INTERRUPTED if stop.raised == signal.SIGINT else 0


def _print(event: WatchEvent, *, as_json: bool) -> None:
    """Print one line. If it cannot be written, for example because the disk is full, the watch continues."""
    try:
        if as_json:
            output.print_json(event.to_dict(), on_a_line=True)
        else:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
            message = times.localized(" ".join(event.message.split()))
            output.echo(f"{at} {'problem: ' if event.kind == 'problem' else ''}{message}")
    except OutputError:
        return


def _print_holder(workspace: Workspace, holder: WatchHolder | None) -> None:
    if holder is not None:
        output.echo(f"{workspace.root.path} is watched already, by {holder}; nothing was done", err=True)
