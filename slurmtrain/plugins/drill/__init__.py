"""``slurmtrain drill``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmtrain.cli import options, output, tables
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import FAILED, FAULTS, NOT_TRIED, PASSED
from slurmtrain.plugins.drill.judge import AGENTS_IN_PLACE, AGENTS_REQUEUE

if TYPE_CHECKING:
    from slurmtrain.plugins.drill.drill_runs import DrillReport
    from slurmtrain.plugins.drill.facts import DrillProblem, FaultVerdict


# With the padding of a drawn table, its widest rows fit a terminal of 80 columns.
_HEADERS = ("FAULT", "RUN", "RESULT", "STOPPED", "LOST", "SAME", "RESTART", "BACK")
_RESULTS = {PASSED: "passed", FAILED: "FAILED", NOT_TRIED: "not tried"}
# What restarts a run, in a word. Its agents can do so in two ways.
_RESTARTED = {AGENTS_IN_PLACE: "in place", AGENTS_REQUEUE: "requeue"}


@options.command("drill exp.yaml params.steps=200 checkpoint.every.steps=20")
@options.spec_argument
@options.overrides_argument
@click.option(
    "--fault", "faults", type=click.Choice(list(FAULTS)), multiple=True,
    help="Inject only this fault; repeatable. By default all; hang only if requeue.hang_after is set.",
)  # fmt: skip
@click.option(
    "--twice", is_flag=True,
    help="Always make the undisturbed run twice; by default only if a run with a fault ends differently.",
)  # fmt: skip
@options.executor_option
@options.json_option
def drill_command(
    workspace: Workspace, spec: Path, overrides: tuple[str, ...], faults: tuple[str, ...], twice: bool,
    executor: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Run SPEC undisturbed, then once per fault, and compare: a fire drill with your own script.

    KEY=VALUE overrides make it short, such as params.steps=200 and checkpoint.every.steps=20. Exits with 0 if every run
    passed, else with 1: also if a fault could not be tried, unless it is 'save'.
    """
    from slurmtrain.cli.watch_commands import run_progress
    from slurmtrain.plugins.drill.drill_runs import DrillOptions, run_drill

    chosen = workspace.config.choose_executor(executor)
    drill_options = DrillOptions(path=spec, overrides=overrides, faults=faults, executor=chosen, twice=twice)
    workspace = workspace.looking_again()
    try:
        with run_progress(workspace) as look:
            report = run_drill(workspace, drill_options, lambda line: output.echo(line, err=True), look)
    # A submitted run belongs to the scheduler, so it does not end with this command.
    except KeyboardInterrupt:
        output.echo("the drill has stopped; its last run continues ('slurmtrain cancel @last' ends it)", err=True)
        raise
    if as_json:
        output.print_json(report.to_dict())
    else:
        _print_report(report)
    return 0 if report.passed else 1


def _print_report(report: DrillReport) -> None:
    run = report.reference
    reason = f": {run.reason}" if run.reason else ""
    after = f" after {report.seconds:.0f} s" if report.seconds is not None else ""
    output.paragraph(f"undisturbed: run {run.id} {run.state}{after}{reason}", "  ")
    for line in _findings_lines(report.script.problems, report.script.notes):
        output.paragraph(f"undisturbed: {line}", "  ")
    if report.again is not None:
        output.paragraph(f"undisturbed once more: its last checkpoint {report.again.describe()}", "  ")
    if not report.verdicts:
        output.echo(f"no fault was tried; 'slurmtrain why {run.id}' says more")
        return
    tables.print_table(_HEADERS, [_verdict_row(verdict) for verdict in report.verdicts])
    for verdict in report.verdicts:
        if verdict.not_tried:
            output.paragraph(f"{verdict.fault}: not tried: {verdict.not_tried}", "  ")
        for line in _findings_lines(verdict.problems, verdict.notes):
            output.paragraph(f"{verdict.fault}: {line}", "  ")


def _findings_lines(problems: Sequence[DrillProblem], notes: Sequence[str]) -> list[str]:
    return [*(f"{problem.problem}; {problem.advice}" for problem in problems), *notes]


def _verdict_row(verdict: FaultVerdict) -> tuple[str, ...]:
    stopped = "-"
    if verdict.stopped_s is not None:
        allowed = "" if verdict.allowed_s is None else f"/{verdict.allowed_s:.0f}"
        stopped = f"{_short_seconds(verdict.stopped_s)}{allowed} s"
    # "nobody" is a finding; "-" means that there was no fault to recover from.
    restarted = "nobody" if verdict.restarted_by is None and verdict.injected else "-"
    if verdict.restarted_by is not None:
        restarted = _RESTARTED.get(verdict.restarted_by, verdict.restarted_by)
    return (
        verdict.fault,
        verdict.run_id or "-",
        _RESULTS[verdict.result],
        stopped,
        "-" if verdict.lost_steps is None else str(verdict.lost_steps),
        {True: "yes", False: "no", None: "-"}[verdict.comparison.identical],
        restarted,
        "-" if verdict.step_s is None else f"{_short_seconds(verdict.step_s)} s",
    )


def _short_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
