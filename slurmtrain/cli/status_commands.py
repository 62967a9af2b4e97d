"""``slurmtrain status``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import options, output, tables
from slurmtrain.ops.query.select import NEWEST, Question
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.ops.query.select import Selection
    from slurmtrain.ops.search.trials import SearchSummary


@options.command(
    "status",
    "status 'cnn*' --all",
    "status --where 'params.lr < 0.1 and state = completed' --sort -metrics.acc --limit 5",
    looks=True,
)
@options.some_runs_argument
@options.question_options
@click.option("--all", "all_runs", is_flag=True, help=f"List all runs, not only open ones and the newest {NEWEST}.")
@click.option("--no-fold", "unfolded", is_flag=True, help="List each run of a sweep, not one line for all of them.")
@click.option("--tree", is_flag=True, help="Print below each run those that start after it, with all of its chain.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@options.interval_option
@options.csv_option
@options.json_option
def status_command(
    workspace: Workspace, names: tuple[str, ...], question: Question, all_runs: bool, unfolded: bool, tree: bool,
    watch: bool, interval: float, as_csv: bool, as_json: bool,
) -> int:  # fmt: skip
    """List runs: first the runs that may still change, then the newest.

    RUN may also be a pattern such as 'cnn*', or the id of a sweep. If nothing is asked, a sweep is one line: how many
    of its runs are in each state, and the best values of its metrics. Fields in --where, --sort and --columns have the
    names of the JSON; docs/queries.md explains conditions.

    On a terminal each run is one line, and columns that do not fit are left out; elsewhere everything is printed. It
    only reads journals and checks processes; it never starts or ends anything. --all also lists archived runs and,
    where a group shares the runs root, the other users' runs.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    from slurmtrain.ops.unmirrored import describe_unmirrored

    # Other programs want all runs, people the runs that matter now.
    for_programs = as_csv or as_json
    folds = not (unfolded or for_programs)
    question = replace(question, names=names, all_runs=all_runs, for_programs=for_programs, folds=folds, tree=tree)
    if not watch:
        selection = _look(workspace, question)
        if not selection.runs and selection.total:
            output.note(f"none of {selection.total} runs matches; 'slurmtrain status --all' lists all")
        elif not selection.runs:
            output.note(f"no runs in {workspace.root.path}; 'slurmtrain submit' starts one")
        _print_selection(workspace, question, selection, as_csv=as_csv, as_json=as_json)
        if not for_programs:
            _describe_sweeps(workspace, names, selection)
            for line in describe_unmirrored(workspace, selection.runs):
                output.note(line)
        return 0
    workspace = workspace.looking_again()
    if output.is_terminal(sys.stdout) and not for_programs:
        from rich.live import Live

        with Live(console=tables.console(), auto_refresh=False, screen=False) as live:
            while True:
                selection = _look(workspace, question)
                lines, size = _indented(selection.lines), (live.console.width, live.console.height)
                columns = tables.columns_of(lines, selection.fields, question.columns)
                live.update(tables.screen(lines, columns, size, selection.cut), refresh=True)
                time.sleep(interval)
    while True:
        _print_selection(workspace, question, _look(workspace, question), as_csv=as_csv, as_json=as_json)
        sys.stdout.flush()
        time.sleep(interval)


def _look(workspace: Workspace, question: Question) -> Selection:
    from slurmtrain.ops.query.select import select_runs
    from slurmtrain.ops.shared.observe import observe

    observed = observe(workspace)
    output.warn_about(observed)
    selection = select_runs(workspace, observed.runs, question)
    output.warn(selection.notes)
    return selection


def _describe_sweeps(workspace: Workspace, names: Sequence[str], selection: Selection) -> None:
    """Summarize the sweeps that were named, below their runs."""
    for name in names:
        runs = [run for run in selection.runs if run["sweep"] == name]
        if runs:
            from slurmtrain.model.query.comparison import describe_sweep

            output.note(describe_sweep(runs))
            for search in _searches(workspace, [name], selection):
                output.note(str(search))


def _searches(workspace: Workspace, names: Sequence[str], selection: Selection) -> Sequence[SearchSummary]:
    """The searches that were named. ``selection``: what is listed."""
    sweeps = {run["sweep"] for run in selection.runs}
    searches = [name for name in names if name in sweeps]
    if not searches:
        return []
    from slurmtrain.ops.search.trials import summarize

    return summarize(workspace, searches)


def _print_selection(
    workspace: Workspace, question: Question, selection: Selection, *, as_csv: bool, as_json: bool
) -> None:
    if as_csv:
        tables.print_runs_csv(selection.runs, question.columns)
        return
    if as_json:
        from slurmtrain.model.query.fields import value_of
        from slurmtrain.ops.shared.views import SCHEMA, now_iso

        runs: Sequence[Mapping[str, Any]] = selection.runs
        if question.columns:
            runs = [{name: value_of(run, name) for name in question.columns} for run in runs]
        searches = [search.to_json() for search in _searches(workspace, question.names, selection)]
        answer = {"schema": SCHEMA, "as_of": now_iso(), "runs": [dict(run) for run in runs]}
        output.print_json({**answer, "searches": searches} if searches else answer)
        return
    if question.columns:
        tables.print_runs(selection.runs, only=question.columns)
    elif selection.runs:
        tables.print_runs(_indented(selection.lines), selection.fields)
    if selection.cut:
        output.note(tables.describe_others(selection.cut))


def _indented(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Lines of runs with their names as in a tree."""
    return [{**line, "name": "  " * line["depth"] + line["name"]} if line.get("depth") else line for line in lines]
