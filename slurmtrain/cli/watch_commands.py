"""What keeps runs going, waits for them, and ends them: ``sync``, ``watch``, ``wait`` and ``cancel``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.errors import OutputError
from slurmtrain.ops.shared.views import run_json, runs_json
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run
    from slurmtrain.ops.watch import WatchEvent, WatchHolder
    from slurmtrain.registry.rows import Listed

# 128 and the number of SIGINT, as shells report a process that it ended.
_INTERRUPTED = 130


@options.command("watch", "watch --once")
@click.option(
    "--every", metavar="S", type=options.Seconds(10), default=60.0, show_default=True,
    help="Seconds between two rounds, at least 10.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Do a single round, as for cron; exit with 1 if something went wrong.")
@options.json_option
def watch_command(workspace: Workspace, every: float, once: bool, as_json: bool) -> int:
    """Repeat what sync does until SIGTERM or Ctrl-C: a process for a login node.

    It prints a line for each action and each problem, and when a problem is over. If another watch is running for these
    runs, it says which and exits with 0.
    """
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.ops.watch import watch

    problems: list[str] = []

    def report(event: WatchEvent) -> None:
        # Only for --once, whose exit code depends on it: a watch would collect them for months.
        if once and event.kind == "problem":
            problems.append(event.message)
        # A watch goes on if a line cannot be written, for example because the disk is full.
        with suppress(OutputError):
            if as_json:
                output.print_json(event.to_dict(), on_a_line=True)
                return
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
            message = formatting.localized(" ".join(event.message.split()))
            output.echo(f"{at} {'problem: ' if event.kind == 'problem' else ''}{message}")

    if once:
        _print_holder(workspace, watch(workspace.config, every, report))
        return 1 if problems else 0
    with StopSignal() as stop:
        _print_holder(workspace, watch(workspace.config, every, report, stop))
        return _INTERRUPTED if stop.raised == signal.SIGINT else 0


def _print_holder(workspace: Workspace, holder: WatchHolder | None) -> None:
    if holder is not None:
        output.echo(f"{workspace.root.path} is watched already, by {holder}; nothing was done", err=True)


@options.command("sync")
@options.json_option
def sync_command(workspace: Workspace, as_json: bool) -> int:
    """Read new events, complete what a killed command left unfinished, restart runs, and mirror them to MLflow.

    Repeating it is harmless. Exits with 1 if something could not be done; the next sync tries again.
    """
    from slurmtrain.ops.sync import sync

    synced = sync(workspace)
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    actions = {
        "started": synced.started,
        "released": synced.released,
        "cancelled": synced.cancelled,
        "ended": synced.ended,
        "mirrored": synced.mirrored,
    }
    if as_json:
        output.print_json({"schema": 1, "runs": len(synced.observed.runs), **actions, "problems": synced.problems})
    else:
        counts = [f"{len(ids)} {action}" for action, ids in actions.items() if ids]
        output.echo(
            f"{len(synced.observed.runs)} runs" + (f": {', '.join(counts)}" if counts else "; nothing to do"), err=True
        )
    return 1 if synced.problems else 0


@options.command("wait digits cnn")
@options.runs_argument
@options.json_option
def wait_command(workspace: Workspace, names: tuple[str, ...], as_json: bool) -> int:
    """Wait until each RUN has ended. Exits with 0 if all completed, else with 1."""
    from slurmtrain.ops.shared.find import find_all

    run_ids, _ = find_all(workspace, names)
    return wait_for_runs(workspace, run_ids, as_json=as_json)


@options.command("cancel @last", "cancel 'cnn-*' --yes")
@options.some_runs_argument
@click.option("--all", "all_runs", is_flag=True, help="Cancel all runs that have not ended.")
@click.option("--force", is_flag=True, help="Kill immediately, without letting the run save.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before cancelling several runs.")
@options.verbose_option
@options.json_option
def cancel_command(
    workspace: Workspace, names: tuple[str, ...], all_runs: bool, force: bool, yes: bool, verbose: bool, as_json: bool
) -> int:
    """Cancel each RUN: let it save and exit, and kill processes that do not exit.

    A RUN may be a sweep, or a pattern such as 'cnn-*', for all of these runs that have not ended. On a terminal you
    are asked before several are cancelled by one word or --all. Works from any terminal of the machine; for Slurm jobs,
    from any machine of the cluster.
    """
    from slurmtrain.errors import UserError
    from slurmtrain.model.query.comparison import count_states
    from slurmtrain.ops.cancel import cancel, find_runs
    from slurmtrain.ops.shared.find import namesakes
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.relatives import describe_blocked, open_dependents

    if names and all_runs:
        raise UserError("give either runs or --all, which cancels all of them")
    if not names and not all_runs:
        raise UserError("name the runs to cancel; --all cancels all that have not ended")
    if names:
        run_ids, before = find_runs(workspace, names)
    else:
        before = observe(workspace, ask_slurm=False)
        run_ids = [run_id for run_id, row in before.runs.index.items() if not row.ended]
    if len(run_ids) > len(names) and not yes and output.can_ask():
        runs = before.runs.fetch(run_ids)
        lines = [f"{run_id}  {runs[run_id].name}  {runs[run_id].state}" for run_id in run_ids]
        output.require_consent(f"cancel these {len(run_ids)} runs?", lines)
    # Both before anything is cancelled: afterwards all have ended, and nothing waits for them.
    over = {run_id for run_id, listed in before.runs.fetch(run_ids).items() if listed.ended}
    waiting = open_dependents(workspace, before, run_ids)
    ended = cancel(workspace, run_ids, force=force)
    if as_json:
        output.print_json(_cancelled_json(workspace, ended))
    # What goes on comes first: of very many runs, only the first are listed.
    lines = [_describe_end(run, was_over=run_id in over) for run_id, run in ended.items() if not run.ended]
    lines += [_describe_end(run, was_over=run_id in over) for run_id, run in ended.items() if run.ended]
    output.notes(output.few(lines, verbose=verbose))
    if len(ended) > 1:
        output.note(f"{len(ended)} runs: {count_states([run.state for run in ended.values()])}")
    output.notes(output.few(list(describe_blocked(workspace, waiting)), verbose=verbose))
    index = before.runs.index
    newest_of = {index[run_id].name: run_id for run_id in run_ids if run_id in index}
    for name in names:
        # Who names a run may have forgotten that others of this name go on.
        others = set(namesakes(index, newest_of[name])) - set(run_ids) if name in newest_of else ()
        if others:
            output.note(f"not cancelled, and also named {name}: {', '.join(output.few(sorted(others)))}")
    return 0 if all(run.ended for run in ended.values()) else 1


def _describe_end(run: Run, *, was_over: bool) -> str:
    if was_over:
        return f"run {run.id} had ended already: {run.state}"
    return f"run {run.id} is {run.state}" + (f": {run.reason}" if run.reason not in ("", run.state) else "")


def _cancelled_json(workspace: Workspace, ended: Mapping[str, Run]) -> dict[str, Any]:
    """The runs as they are now, which need not be what their journals say: a full disk, or a deleted directory.

    Of a run that the registry does not know there are only ``id``, ``state`` and ``reason``.
    """
    from slurmtrain.ops.shared.observe import observe

    listed = observe(workspace, ended, ask_slurm=False).runs.fetch(ended)
    answer = runs_json(workspace, listed)
    facts = {run["id"]: run for run in answer["runs"]}
    for run_id, run in ended.items():
        if run_id not in facts or facts[run_id]["state"] != run.state:
            facts[run_id] = {**facts.get(run_id, {}), "id": run_id, "state": run.state, "reason": run.reason}
    return {**answer, "runs": [facts[run_id] for run_id in ended]}


# --- waiting, with progress on standard error: bars on a terminal, plain lines elsewhere -----------------------------

# Without a terminal, print the progress of a training run this often.
_LINE_EVERY_S = 10.0
# The cells of a bar; on a narrower terminal there is none, so that names, states and steps have room.
_BAR, _WIDE_ENOUGH = 20, 80
# The longest state.
_STATE = len("completed")

ShowRuns = Callable[[Mapping[str, "Listed"]], None]


@contextmanager
def run_progress(workspace: Workspace) -> Iterator[ShowRuns]:
    """Yield a function that displays runs by id, to be called after each observation."""
    with _bars() if output.is_terminal(sys.stderr) else nullcontext(_Lines().print) as update:
        yield lambda runs: update([run_json(workspace, listed) for listed in runs.values()])


def describe_progress(run: Mapping[str, Any]) -> str:
    """How far a run has come, and its reason for waiting, as far as that is known."""
    cells = ((name, tables.RUN_COLUMNS[name].cell(run)) for name in ("step", "rate", "eta", "metrics", "reason"))
    return "  ".join(f"ETA {cell}" if name == "eta" else cell for name, cell in cells if cell not in ("-", ""))


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
            line = (
                f"{time.strftime('%H:%M:%S')} {run['name']} {run['id']} {run['state']} {step}{describe_progress(run)}"
            )
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
                    description=output.printable(f"{run['id']} {run['state']:<{_STATE}} {run['name']}"),
                    total=run["total_steps"],
                    completed=run["step"] or 0,
                    state=run["state"],
                    details=output.printable(describe_progress(run)),
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
    from slurmtrain.ops.watch import wait

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
