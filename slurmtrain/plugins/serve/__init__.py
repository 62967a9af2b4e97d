"""``slurmtrain serve``: the pages of ``report``, live. Only this command needs starlette and uvicorn."""

from __future__ import annotations

import os

import click

from slurmtrain.cli import options, output
from slurmtrain.errors import NotAvailable
from slurmtrain.ops.shared.workspace import Workspace

# Where nobody may listen but this machine: the pages have no other protection than a token.
_HOST = "127.0.0.1"
_PORT = 8321
# How often it is looked whether the server still runs, in seconds.
_CHECK_S = 1.0


@options.command("serve", "serve --port 8400", looks=True)
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N",
    help=f"The port to listen on.  [default: {_PORT}, or the next free one]",
)  # fmt: skip
@options.interval_option
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser of this machine.")
@options.json_option
def serve_command(workspace: Workspace, port: int | None, interval: float, opens: bool, as_json: bool) -> int:
    """Show the pages of 'report' live, in a browser, until Ctrl-C: all runs, and each run and sweep.

    Pages update themselves when runs change, and are read-only. The server listens on this machine only; on a login
    node, the command for an SSH tunnel is printed too. Anyone with the printed address can read all pages; its token
    is a new one each time.
    """
    from slurmtrain.plugins.serve.live_pages import LivePages
    from slurmtrain.plugins.serve.page_server import PageServer
    from slurmtrain.system.local_pages import has_browser, listen_on, place_of_page, tunnel
    from slurmtrain.system.process import StopSignal

    with listen_on(_HOST, port or _PORT, or_next=port is None) as listener:
        bound = int(listener.getsockname()[1])
        server = PageServer(LivePages(workspace.config, interval, workspace.patience_s), listener)
        address = f"http://{place_of_page(_HOST, bound)}/?token={server.token}"
        line = tunnel(os.environ, _HOST, bound)
        with StopSignal() as stop, server:
            if as_json:
                facts = {"schema": 1, "url": address, "port": bound, "token": server.token, "tunnel": line or None}
                output.print_json(facts, on_a_line=True)
            else:
                output.verbatim(address)
            if line:
                output.echo(f"to open this address on your own machine, run there: {line}", err=True)
            if port is None and bound != _PORT:
                output.echo(f"port {_PORT} is not available; using {bound} instead", err=True)
            output.echo("Ctrl-C ends it", err=True)
            if opens and has_browser(os.environ):
                import webbrowser

                webbrowser.open(address)
            elif opens:
                output.warn(["there is no screen here to open a browser on; open the address above"])
            while not stop.wait(_CHECK_S):
                if not server.is_alive:
                    raise NotAvailable("the server has ended by itself; its error is above")
    return 0
