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
from slurmtrain.cli.drawing import wrap
from slurmtrain.errors import OutputError
from slurmtrain.model.query.comparison import count_states
from slurmtrain.model.query.fields import differing
from slurmtrain.ops.shared.views import RunRecord, runs_json
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
    """Run sync again and again, until SIGTERM or Ctrl-C; meant for a login node.

    It prints a line for each action, for each problem, and when a problem is over. If another watch already runs for
    these runs, it names that one and exits with 0.
    """
    from slurmtrain.ops.watch import watch
    from slurmtrain.system.process import StopSignal

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
        output.echo(f"another watch already runs for {workspace.root.path}: {holder}; nothing was done", err=True)


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

    A RUN may be a sweep, or a pattern such as 'cnn-*', and means its runs that have not ended. On a terminal it
    asks before one word or --all cancels several. It works from any terminal of the machine; for Slurm jobs, from any
    machine of the cluster.
    """
    from slurmtrain.errors import UserError
    from slurmtrain.model.query.comparison import count_states
    from slurmtrain.ops.cancel import cancel, find_runs
    from slurmtrain.ops.shared.find import namesakes
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.relatives import describe_blocked, open_dependents

    if names and all_runs:
        raise UserError("give either runs or --all, not both")
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


# --- waiting, with progress on standard error: a table on a terminal, plain lines elsewhere ---------------------------

# Without a terminal, print the progress of training runs this often.
_LINE_EVERY_S = 10.0
# Of more runs than this, only counts and changes are printed; a table at the end has them summed up.
_MANY = 20
# What a terminal shows first: what goes on, then what may, then what somebody may have to look at.
_ORDER = ("running", "requeued", "pending", "created", "lost", "unreadable", "failed", "cancelled", "completed")

ShowRuns = Callable[[Mapping[str, "Listed"]], None]


@contextmanager
def run_progress(workspace: Workspace) -> Iterator[ShowRuns]:
    """Yield a function that displays runs by id, to be called after each observation."""
    with _table() if output.is_terminal(sys.stderr) else nullcontext(_Lines().print) as update:
        yield lambda runs: update(_records(workspace, runs))


def _records(workspace: Workspace, runs: Mapping[str, Listed]) -> list[RunRecord]:
    """Runs as lists show them; deleted ones only if there are no others."""
    kept = [listed for listed in runs.values() if listed.row["deleted_at"] is None]
    return [RunRecord(workspace, listed) for listed in kept or runs.values()]


def describe_progress(run: Mapping[str, Any]) -> str:
    """How far a run has come, and its reason for waiting, as far as that is known."""
    cells = ((name, tables.RUN_COLUMNS[name].cell(run)) for name in ("step", "rate", "eta", "metrics", "reason"))
    return "  ".join(f"ETA {cell}" if name == "eta" else cell for name, cell in cells if cell not in ("-", ""))


def _count(runs: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(runs)} runs: {count_states([run['state'] for run in runs])}"


class _Lines:
    """Print a line for each change of state, and occasionally one for progress."""

    def __init__(self) -> None:
        # By run id: the last printed state, and when it was printed (time.monotonic()). All together: the empty id.
        self._printed: dict[str, tuple[str, float]] = {}

    def print(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """Print a line for each run with a new state or due progress; progress of many runs is one line."""
        swept = differing([run["params"] for run in runs])
        for run in runs:
            if not self._is_due(run["id"], run["state"], progresses=run["state"] == "running" and len(runs) <= _MANY):
                continue
            step = "" if run["step"] is None else "step "
            facts = (run["name"], run["id"], run["state"], formatting.params(run["params"], swept))
            line = " ".join(filter(None, (*facts, step + describe_progress(run))))
            output.echo(f"{time.strftime('%H:%M:%S')} {line}".rstrip(), err=True)
        if len(runs) > _MANY and self._is_due("", "", progresses=True):
            output.echo(f"{time.strftime('%H:%M:%S')} {_count(runs)}", err=True)

    def _is_due(self, key: str, state: str, *, progresses: bool) -> bool:
        before, at = self._printed.get(key, (None, 0.0))
        now = time.monotonic()
        if state == before and not (progresses and now - at >= _LINE_EVERY_S):
            return False
        self._printed[key] = (state, now)
        return True


@contextmanager
def _table() -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    drawer = tables.console(stderr=True)
    shown_before: dict[str, Mapping[str, Any]] = {}
    # Afterwards the table on standard output has all of this, if that is the same terminal.
    transient = output.is_terminal(sys.stdout)
    with Live(console=drawer, auto_refresh=False, transient=transient, vertical_overflow="crop") as live:

        def update(runs: Sequence[Mapping[str, Any]]) -> None:
            shown_before.update({run["id"]: run for run in runs})
            shown = sorted(
                shown_before.values(), key=lambda run: _ORDER.index(run["state"]) if run["state"] in _ORDER else -1
            )
            columns = tables.columns_of(shown, name="wait")
            above = [Text(line) for line in wrap(_count(shown), drawer.width)] if len(shown) > 1 else []
            drawn = tables.screen(shown, columns, (drawer.width, drawer.height - len(above)))
            live.update(Group(*above, drawn), refresh=True)

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
        rest = f"the run continues ('slurmtrain cancel {run_ids[-1]}' ends it)"
        if len(run_ids) > 1:
            rest = f"{len(run_ids)} runs continue ('slurmtrain status' lists them)"
        output.echo(f"stopped waiting; {rest}", err=True)
        raise
    output.warn_about(synced.observed)
    output.warn([*synced.notes, *synced.problems])
    chosen = {run_id: synced.observed.runs[run_id] for run_id in [*run_ids, *synced.searched]}
    if as_json:
        output.print_json(runs_json(workspace, chosen))
    else:
        _print_ended(workspace, _records(workspace, chosen))
    return 0 if completed else 1


def _print_ended(workspace: Workspace, runs: Sequence[Mapping[str, Any]]) -> None:
    """Print runs that were waited for; of many on a terminal, sweeps as one entry, and what did not complete."""
    if len(runs) <= _MANY or not output.is_terminal(sys.stdout):
        tables.print_runs(runs)
        return
    from slurmtrain.ops.query.select import fold_records

    lines = fold_records(workspace, runs)
    listed = {line["id"] for line in lines}
    others = [run for run in runs if run["id"] not in listed and run["state"] != "completed"]
    tables.print_runs([*lines, *others[:_MANY]])
    if rest := [run["state"] for run in others[_MANY:]]:
        output.note(tables.describe_others(rest))
    if others or len(lines) < len(runs):
        output.note("'slurmtrain status SWEEP' lists the runs of a sweep")
