"""``slurmtrain preflight``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurmtrain.cli.describe import check_tables, node_lists
from slurmtrain.cli.shared import options, output, tables, times
from slurmtrain.ops.shared.workspace import Workspace


@click.command(
    "preflight",
    short_help="Check nodes without training.",
    epilog=options.examples("preflight --nodes 4 slurm.partition=spot"),
)
@options.overrides_argument
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; by default that of the spec, else 1.")
@click.option("--spec", metavar="FILE", type=click.Path(path_type=Path), help="A spec with the nodes and checks.")
@options.executor_option
@click.option("--local", "executor", flag_value="local", help="The same as --executor local.")
@options.json_option
@options.in_workspace
def command(
    workspace: Workspace,
    overrides: tuple[str, ...],
    nodes: int | None,
    spec: Path | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Run only the preflight, as a job of its own, and print its findings.

    KEY=VALUE overrides a key of the spec, such as slurm.nodelist=node3 or preflight.bandwidth=fail. Exits with 0 if no
    check failed, else with 1. It also uses nodes of the ledger. Ctrl-C ends the job.
    """
    from slurmtrain.cli.shared.progress import run_progress
    from slurmtrain.ops.cancel import cancel
    from slurmtrain.ops.preflight import submit_preflight
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.ops.wait import wait

    chosen = workspace.config.choose_executor(executor)
    with StopSignal() as stop:
        run_id, notes = submit_preflight(workspace, spec, overrides, nodes=nodes, executor=chosen)
        output.warn(notes)
        workspace = workspace.looking_again()
        with run_progress(workspace) as report:
            completed, synced = wait(workspace, [run_id], report, stop)
        # Interrupted: nothing else waits for the job's findings.
        if not synced.observed.runs[run_id].ended:
            cancel(workspace, [run_id])
            output.echo(f"run {run_id} was cancelled", err=True)
            raise KeyboardInterrupt
    output.warn_about(synced.observed)
    run, findings = _details(workspace, run_id, synced.observed.runs[run_id])
    if as_json:
        output.print_json({"schema": 1, "run": run, "checks": findings})
    else:
        _print(run, findings)
    return 0 if completed and not check_tables.has_failed(findings) else 1


def _details(workspace: Workspace, run_id: str, listed: Any) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The run as ``show`` prints it, and the findings of its preflight by host."""
    from slurmtrain.ops.shared.run_details import findings_json, show_json

    run = workspace.store.load(run_id)
    assert run is not None
    return show_json(workspace, listed, run), findings_json(workspace, run)


def _print(run: dict[str, Any], findings: dict[str, list[dict[str, Any]]]) -> None:
    newest = run["attempts"][-1] if run["attempts"] else None
    if findings:
        tables.print_table(check_tables.CHECK_HEADERS, check_tables.check_rows(findings))
    if newest is not None and (rows := check_tables.network_rows(newest["network"])):
        output.echo()
        tables.print_table(check_tables.NETWORK_HEADERS, rows)
        for line in check_tables.excluded_addresses(newest["network"]):
            output.paragraph(f"left out: {line}", "  ")
    if newest is not None and newest["clock"]:
        output.echo("", f"clocks ahead of node 0's: {node_lists.describe_clocks(newest['clock'])}")
    if run["state"] != "completed":
        output.echo(f"run {run['id']} is {run['state']}: {times.localized(run['reason'])}", err=True)
    elif not findings:
        output.echo(f"run {run['id']} reported no checks", err=True)
