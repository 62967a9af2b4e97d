"""Waiting, with progress on standard error: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slurmtrain.cli import output, tables
from slurmtrain.cli.output import is_terminal, printable
from slurmtrain.ops.shared.views import run_json, runs_json
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# Without a terminal, print the progress of a training run this often.
_LINE_EVERY_S = 10.0
# The cells of a bar; on a narrower terminal there is none, so that names, states and steps have room.
_BAR, _WIDE_ENOUGH = 20, 80
# The longest state.
_STATE = len("completed")
# Fewer bytes than this are read before a user would suspect a hang.
_LARGE_BYTES = 1 << 30

ShowRuns = Callable[[Mapping[str, "Listed"]], None]
ShowBytes = Callable[[int, int], None]
"""A callback that takes the number of bytes read and the total."""
ShowCount = Callable[[int, int], None]
"""A callback that takes how many are done and the total."""


@contextmanager
def run_progress(workspace: Workspace) -> Iterator[ShowRuns]:
    """Yield a function that displays runs by id, to be called after each observation."""
    if is_terminal(sys.stderr):
        with _bars() as update:
            yield lambda runs: update(_as_json(workspace, runs))
    else:
        lines = _Lines()
        yield lambda runs: lines.print(_as_json(workspace, runs))


@contextmanager
def byte_progress() -> Iterator[ShowBytes]:
    """Yield a callback that shows the progress of reading large files: a bar, on a terminal only."""
    if not is_terminal(sys.stderr):
        yield lambda _read, _total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=tables.console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda read, total: progress.update(task, completed=read, total=total, visible=total >= _LARGE_BYTES)


@contextmanager
def count_progress(unit: str) -> Iterator[ShowCount]:
    """Yield a callback that shows how many of a known number are done: a bar, on a terminal only.

    Args:
        unit: What is counted, in the plural.
    """
    if not is_terminal(sys.stderr):
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=tables.console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def describe(run: Mapping[str, Any]) -> str:
    """How far a run has come, and its reason for waiting, as far as that is known."""
    cells = ((name, tables.RUN_COLUMNS[name].cell(run)) for name in ("step", "rate", "eta", "metrics", "reason"))
    return "  ".join(f"ETA {cell}" if name == "eta" else cell for name, cell in cells if cell not in ("-", ""))


def _as_json(workspace: Workspace, runs: Mapping[str, Listed]) -> list[dict[str, Any]]:
    return [run_json(workspace, listed) for listed in runs.values()]


class _Lines:
    """Print a line for each change of state, and occasionally one for progress."""

    def __init__(self) -> None:
        # By run id: the last printed state, and when it was printed (time.monotonic()).
        self._printed: dict[str, tuple[str, float]] = {}

    def print(self, runs: list[dict[str, Any]]) -> None:
        """Print a line for each run with a new state or due progress."""
        for run in runs:
            state, at = self._printed.get(run["id"], ("", 0.0))
            now = time.monotonic()
            if run["state"] == state and (run["state"] != "running" or now - at < _LINE_EVERY_S):
                continue
            self._printed[run["id"]] = (run["state"], now)
            step = "" if run["step"] is None else "step "
            line = f"{time.strftime('%H:%M:%S')} {run['name']} {run['id']} {run['state']} {step}{describe(run)}"
            output.echo(line.rstrip(), err=True)


@contextmanager
def _bars() -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Bar(BarColumn):
        """A bar, which moves to and fro while a run trains whose number of steps is unknown."""

        def render(self, task: Any) -> Any:
            """None for a run that does not train, and never said how many steps it has."""
            return Text() if task.total is None and task.fields["state"] != "running" else super().render(task)

    drawer = tables.console(stderr=True)
    columns = (
        # A name may contain what rich would take for markup.
        TextColumn("{task.description}", markup=False),
        *([Bar(bar_width=_BAR)] if drawer.width >= _WIDE_ENOUGH else []),
        TextColumn("{task.fields[details]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=drawer, transient=False) as progress:
        tasks: dict[str, Any] = {}

        def update(runs: list[dict[str, Any]]) -> None:
            for run in runs:
                if run["id"] not in tasks:
                    tasks[run["id"]] = progress.add_task("", total=None, state="", details="")
                progress.update(
                    tasks[run["id"]],
                    # The name comes last, since the end of a long line is cut.
                    description=printable(f"{run['id']} {run['state']:<{_STATE}} {run['name']}"),
                    total=run["total_steps"],
                    completed=run["step"] or 0,
                    state=run["state"],
                    details=printable(describe(run)),
                )

        yield update


def wait_for_runs(workspace: Workspace, run_ids: Sequence[str], *, as_json: bool) -> int:
    """Wait for runs to end, and print how they ended.

    Args:
        workspace: where the runs are.
        run_ids: the runs to wait for.
        as_json: print JSON rather than a table.

    Returns:
        The exit code: 0 if all runs completed, else 1.
    """
    from slurmtrain.ops.wait import wait

    workspace = workspace.looking_again()
    try:
        with run_progress(workspace) as show:
            completed, synced = wait(workspace, run_ids, show)
    except KeyboardInterrupt:
        output.echo(f"no longer waiting; the run continues ('slurmtrain cancel {run_ids[-1]}' ends it)", err=True)
        raise
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    chosen = {run_id: synced.observed.runs[run_id] for run_id in [*run_ids, *synced.searched]}
    if as_json:
        output.print_json(runs_json(workspace, chosen))
    else:
        tables.print_runs([run_json(workspace, listed) for listed in chosen.values()])
    return 0 if completed else 1
