"""Running the page in a terminal, which is restored however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from slurmtrain.cli.shared import output
from slurmtrain.cli.top.app import TopApp
from slurmtrain.ops.shared.workspace import Workspace

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long the terminal may take to be restored after a signal: one that was closed cannot be written to.
_RESTORED_S = 3.0


def run_page(workspace: Workspace, interval_s: float) -> int:
    """Show the page until it is left; returns the exit code, 128 and the signal's number if a signal ended it.

    Args:
        workspace: The runs.
        interval_s: Seconds between two looks.
    """
    app = TopApp(workspace.config, interval_s)
    code = asyncio.run(_run(app))
    if code is None:
        # textual has printed what went wrong.
        return 1
    if code == 0 and app.actions.under_way:
        output.echo(f"still {'; '.join(app.actions.under_way)}; Ctrl-C leaves that to 'slurmtrain sync'", err=True)
        app.actions.wait()
    return code


async def _run(app: TopApp) -> int | None:
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, _leave, app, 128 + each)
    return await app.run_async()


def _leave(app: TopApp, code: int) -> None:
    """End the page, or at least the process."""
    last = threading.Timer(_RESTORED_S, os._exit, [code])
    last.daemon = True
    last.start()
    app.exit(code)
