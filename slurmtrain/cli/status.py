"""``slurmtrain status``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli.shared import options, output, run_table, tables
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.store import Listed

_SHOWN = 20


@click.command("status", short_help="List runs.", epilog=options.examples("status", "status 'cnn-*' --all"))
@options.some_runs_argument
@click.option("--all", "all_runs", is_flag=True, help=f"List all runs, not only open ones and the newest {_SHOWN}.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@click.option(
    "--interval",
    metavar="S",
    type=options.Seconds(0.5),
    default=2.0,
    show_default=True,
    help="Seconds between refreshes, at least 0.5.",
)
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace, names: tuple[str, ...], all_runs: bool, watch: bool, interval: float, as_json: bool
) -> int:
    """List runs: those that may still change first, then the newest.

    On a terminal each run is one line, and columns that do not fit are left out; elsewhere everything is printed. It
    only reads journals and checks processes; it never starts or ends anything. Where a group shares the runs root,
    --all also lists the runs of the others.
    """
    if not watch:
        _print(workspace, names, all_runs=all_runs, as_json=as_json)
        return 0
    workspace = workspace.looking_again()
    if output.is_terminal(sys.stdout) and not as_json:
        return _live(workspace, names, all_runs, interval)
    while True:
        _print(workspace, names, all_runs=all_runs, as_json=as_json)
        sys.stdout.flush()
        time.sleep(interval)


def _look(workspace: Workspace, names: tuple[str, ...], *, all_runs: bool) -> dict[str, Listed]:
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    runs = observed.runs
    if names:
        from slurmtrain.ops.shared.find import choose_all

        return runs.fetch(choose_all(runs.index, names))
    if all_runs:
        return runs.fetch(runs.index)
    listed = {run_id: row for run_id, row in runs.index.items() if not (row.archived and row.ended)}
    newest = set(list(listed)[-_SHOWN:])
    return runs.fetch([run_id for run_id, row in listed.items() if run_id in newest or not row.ended])


def _print(workspace: Workspace, names: tuple[str, ...], *, all_runs: bool, as_json: bool) -> None:
    from slurmtrain.ops.shared.views import SCHEMA, now_iso, run_json

    runs = _look(workspace, names, all_runs=all_runs or as_json)
    shown = [run_json(workspace, listed) for listed in (runs.values() if as_json else _by_worth(runs))]
    if all_runs and not names and workspace.config.shared_root is not None:
        shown = _with_colleagues(workspace, shown)
    if as_json:
        output.print_json({"schema": SCHEMA, "as_of": now_iso(), "runs": shown})
    elif shown:
        run_table.print_runs(shown)
    else:
        output.echo(f"no runs in {workspace.root.path}; 'slurmtrain submit' starts one", err=True)


def _with_colleagues(workspace: Workspace, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """This user's runs, then those of the others who share the root, each with its ``user``."""
    from slurmtrain.ops.colleagues import runs_of_colleagues

    others, notes = runs_of_colleagues(workspace)
    output.warn(notes)
    return [*({"user": workspace.root.path.name, **run} for run in shown), *others]


def _by_worth(runs: dict[str, Listed]) -> list[Listed]:
    """The runs that may still change first, and of these and the others the newest first."""
    newest_first = sorted(runs.values(), key=lambda listed: listed.id, reverse=True)
    return sorted(newest_first, key=lambda listed: listed.ended)


def _live(workspace: Workspace, names: tuple[str, ...], all_runs: bool, interval: float) -> int:
    from rich.live import Live

    from slurmtrain.ops.shared.views import run_json

    with Live(console=tables.console(), auto_refresh=False, screen=False) as live:
        while True:
            runs = _by_worth(_look(workspace, names, all_runs=all_runs))
            room = run_table.rows_on(live.console.height)
            shown = [run_json(workspace, listed) for listed in runs[:room]]
            others = [listed.state for listed in runs[room:]]
            live.update(run_table.screen(shown, live.console.width, others), refresh=True)
            time.sleep(interval)
