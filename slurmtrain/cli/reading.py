"""Showing how far the reading of large files has come: a bar, on a terminal alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Less than this is read before anybody wonders.
_LARGE = 1 << 30


@contextmanager
def reader() -> Iterator[Callable[[int, int], None]]:
    """Something to tell how many bytes of how many were read."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _done, _all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda done, of: progress.update(task, completed=done, total=of, visible=of >= _LARGE)
