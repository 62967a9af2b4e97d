"""``slurmtrain watch``."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import options
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.watch import Holder, WatchEvent

_INTERRUPTED = 130


@click.command("watch", short_help="Start runs again that nobody else does, until ended.")
@click.option(
    "--every", type=click.FloatRange(min=10), default=60.0, show_default=True, help="Seconds between two rounds."
)
@click.option("--once", is_flag=True, help="Do a single round, as for cron; exit with 1 if something went wrong.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, every: float, once: bool, as_json: bool) -> int:
    """Do what sync does, again and again, until SIGTERM or Ctrl-C: a process for a login node.

    It prints a line for each thing that it did, or that went wrong; a problem once, and once more when it is over. If
    the runs are watched already it says by whom and exits with 0.
    """
    from slurmtrain.ops.shared.interrupt import Stop
    from slurmtrain.ops.watch import watch, watch_once

    problems: list[str] = []

    def tell(news: WatchEvent) -> None:
        if once and news.kind == "problem":
            problems.append(news.message)
        _print(news, as_json=as_json)

    if once:
        _tell_of(workspace, watch_once(workspace.config, every, tell))
        return 1 if problems else 0
    with Stop() as stop:
        _tell_of(workspace, watch(workspace.config, every, tell, stop))
        return _INTERRUPTED if stop.raised == signal.SIGINT else 0


def _print(news: WatchEvent, *, as_json: bool) -> None:
    """One line. A place that takes no more output, such as a full disk, is no reason to watch no longer."""
    try:
        if as_json:
            import json

            click.echo(json.dumps(news.to_dict(), allow_nan=False))
        else:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(news.at))
            click.echo(f"{at} {'problem: ' if news.kind == 'problem' else ''}{' '.join(news.message.split())}")
    except BrokenPipeError:
        raise
    except OSError:
        return


def _tell_of(workspace: Workspace, other: Holder | None) -> None:
    if other is not None:
        click.echo(f"{workspace.root.path} is watched already, by {other}; nothing was done", err=True)
