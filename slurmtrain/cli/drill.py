"""``slurmtrain drill``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmtrain.cli.shared import options, output
from slurmtrain.model.diagnosis.drill import FAULTS
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.diagnosis.drill import FaultVerdict
    from slurmtrain.ops.drill.runs import DrillReport

HEADERS = ("FAULT", "RUN", "RESULT", "STOPPED", "LOST", "IDENTICAL", "STARTED AGAIN", "STEP AFTER", "ATTEMPTS", "STATE")


@click.command("drill", short_help="Inject faults into runs of a spec, and check that they recover.")
@options.spec_argument
@options.overrides_argument
@click.option(
    "--fault",
    "faults",
    type=click.Choice(list(FAULTS)),
    multiple=True,
    help="Inject only this fault; repeatable. By default all, but hang only if requeue.hang_after is set.",
)
@click.option(
    "--twice", is_flag=True, help="Make the undisturbed run twice, to check that the script is deterministic."
)
@options.executor_option
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    spec: Path,
    overrides: tuple[str, ...],
    faults: tuple[str, ...],
    twice: bool,
    executor: str | None,
    as_json: bool,
) -> int:
    """Run SPEC undisturbed, then once per fault, and compare: a fire drill with your own script.

    KEY=VALUE overrides make it short, such as params.steps=200 and checkpoint.every.steps=20. Exits with 0 if every run
    passed, else with 1.
    """
    from slurmtrain.cli.shared.progress import run_progress
    from slurmtrain.ops.drill.runs import DrillOptions, drill

    chosen = options.default_executor(executor or workspace.config.executor)
    drill_options = DrillOptions(path=spec, overrides=overrides, faults=faults, executor=chosen, twice=twice)
    workspace = workspace.looking_again()
    try:
        with run_progress(workspace) as look:
            report = drill(workspace, drill_options, lambda line: click.echo(line, err=True), look)
    # A submitted run belongs to the scheduler, so it does not end with this command.
    except KeyboardInterrupt:
        click.echo("the drill is over; its last run continues ('slurmtrain cancel @last' ends it)", err=True)
        raise
    if as_json:
        output.print_json(report.to_dict())
    else:
        _print(report)
    return 0 if report.passed else 1


def _print(report: DrillReport) -> None:
    from slurmtrain.cli.shared.tables import print_table

    run = report.reference
    took = report.to_dict()["drill"]["reference"]["seconds"]
    reason = f": {run.reason}" if run.reason else ""
    click.echo(f"undisturbed: run {run.id} {run.state}" + (f" after {took:.0f} s" if took is not None else "") + reason)
    if report.again is not None:
        click.echo(f"undisturbed once more: its last checkpoint {report.again.describe()}")
    if not report.verdicts:
        click.echo(f"no fault was tried; 'slurmtrain doctor {run.id}' says more")
        return
    print_table(HEADERS, [_row(verdict) for verdict in report.verdicts])
    for verdict in report.verdicts:
        for problem in verdict.problems:
            click.echo(f"{verdict.fault}: {problem.problem}; {problem.advice}")
        for note in verdict.notes:
            click.echo(f"{verdict.fault}: {note}")


def _row(verdict: FaultVerdict) -> tuple[str, ...]:
    in_time = "" if verdict.allowed_s is None else f" of {verdict.allowed_s:.0f} s"
    stopped = "-" if verdict.stopped_s is None else f"{verdict.stopped_s:.1f} s{in_time}"
    # "nobody" is a finding; "-" means that there was no fault to recover from.
    again = "nobody" if verdict.restarted_by is None and verdict.injected else "-"
    if verdict.restarted_by is not None:
        again = f"{verdict.restarted_by}, {_seconds(verdict.restarted_s)}"
    same = {True: "yes", False: "no", None: "-"}[verdict.comparison.identical]
    restarts = f" + {verdict.restarts} in place" if verdict.restarts else ""
    return (
        verdict.fault,
        verdict.run_id or "-",
        "passed" if verdict.passed else "FAILED",
        stopped,
        "-" if verdict.lost_steps is None else str(verdict.lost_steps),
        same,
        again,
        _seconds(verdict.step_s),
        f"{verdict.attempts}{restarts}",
        verdict.state,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
