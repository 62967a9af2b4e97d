"""Showing that a run goes on: a live bar on a terminal, plain lines elsewhere. Both go to standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import text
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.store import Listed

# Without a terminal, say that a run is getting on this often.
_EVERY_S = 10.0

Tell = Callable[[Mapping[str, "Listed"]], None]


@contextmanager
def teller(workspace: Workspace) -> Iterator[Tell]:
    """Something to hand each look at the waited-for runs to."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _live() as bars:
            yield lambda runs: bars(_facts(workspace, runs))
    else:
        lines = _Lines()
        yield lambda runs: lines.tell(_facts(workspace, runs))


def _facts(workspace: Workspace, runs: Mapping[str, Listed]) -> list[dict[str, Any]]:
    return [run_json(workspace, listed) for listed in runs.values()]


class _Lines:
    """A line for each change of state, and now and then one for progress."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}

    def tell(self, runs: list[dict[str, Any]]) -> None:
        for run in runs:
            state, at = self._told.get(run["id"], ("", 0.0))
            now = time.monotonic()
            if run["state"] == state and (run["state"] != "running" or now - at < _EVERY_S):
                continue
            self._told[run["id"]] = (run["state"], now)
            clock = time.strftime("%H:%M:%S")
            rest = " ".join(
                part for part in (text.rate(run), text.metrics(run), run["reason"]) if part not in ("-", "")
            )
            click.echo(
                f"{clock} {run['name']} {run['id']} {run['state']} step {text.steps(run)} {rest}".rstrip(), err=True
            )


@contextmanager
def _live() -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[steps]}  {task.fields[rate]}  ETA {task.fields[eta]}  {task.fields[metrics]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        tasks: dict[str, Any] = {}

        def update(runs: list[dict[str, Any]]) -> None:
            for run in runs:
                if run["id"] not in tasks:
                    tasks[run["id"]] = progress.add_task("", total=None, steps="", rate="", eta="", metrics="")
                progress.update(
                    tasks[run["id"]],
                    description=f"{run['name']} {run['id']} {run['state']}",
                    total=run["total_steps"],
                    completed=run["step"] or 0,
                    steps=text.steps(run),
                    rate=text.rate(run),
                    eta=text.duration(run["eta_seconds"]),
                    metrics=text.metrics(run),
                )

        yield update
