"""``slurmtrain ui``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.ui import Page


@options.command("ui", "ui 'lr-*'")
@options.maybe_run_argument
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", default=5000, show_default=True,
    help="The server's port; if it is in use, the next free one.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that the server listens on.")
@click.option("--no-browser", "quiet", is_flag=True, help="Only print the address.")
@options.json_option
def ui(workspace: Workspace, run: str | None, port: int, host: str, quiet: bool, as_json: bool) -> int:
    """Send what is new to MLflow, start its server for the store of these runs, and show them until Ctrl-C.

    RUN is shown on its own page; a name that several runs have, a sweep, or a pattern in quotes, as a list of these;
    without one, the experiment of the newest run. The curves of runs that train go on growing. If the store is a server
    that runs already, this prints its address and exits.

    On this machine, and through a tunnel to it, only your own account is served.
    """
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.ops.ui import find_page, keep_mirroring, mirror_new, show_page, tunnel

    _check_host(host)
    observed, outcome = mirror_new(workspace)
    output.warn_about(observed)
    output.warn([*outcome.notes, *outcome.problems])
    page = find_page(workspace, observed, run)
    if page.address:
        _present(page, page.address, as_json=as_json, opens=not quiet)
        return 0

    def occupied(unavailable: int, next_free: int) -> None:
        output.echo(f"port {unavailable} is not available, {next_free} is used instead", err=True)

    with show_page(workspace, page, host, port, occupied) as (server, address):
        _present(page, address, as_json=as_json, opens=not quiet)
        if line := tunnel(os.environ, server):
            output.echo(f"on your own machine, to open this address there: {line}", err=True)
        output.echo("Ctrl-C ends it", err=True)
        with StopSignal() as stop:
            keep_mirroring(workspace, server, lambda problem: output.warn([problem]), stop)
    return 0


def _present(page: Page, address: str, *, as_json: bool, opens: bool) -> None:
    """Print the address of a page, and open it if there is a screen to open it on."""
    from slurmtrain.ops.ui import has_browser

    if as_json:
        output.print_json({"schema": 1, "url": address, "store": page.store}, on_a_line=True)
    else:
        output.echo(address)
    if opens and has_browser(os.environ):
        import webbrowser

        webbrowser.open(address)


def _check_host(host: str) -> None:
    """Warn if ``host`` is not an address of this machine alone."""
    from slurmtrain.tracking.to_mlflow.server import is_loopback

    if not is_loopback(host):
        output.warn([f"everybody who can connect to {host} can read and change what is in the store"])
