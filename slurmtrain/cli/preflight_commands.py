"""Nodes: ``preflight`` and ``nodes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from slurmtrain.cli import describe, formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace


@options.command("preflight --nodes 4 slurm.partition=spot")
@options.overrides_argument
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; by default as in the spec, else 1.")
@click.option("--spec", metavar="FILE", type=click.Path(path_type=Path), help="A spec with the nodes and checks.")
@options.executor_option
@click.option("--local", "executor", flag_value="local", help="The same as --executor local.")
@options.json_option
def preflight(
    workspace: Workspace, overrides: tuple[str, ...], nodes: int | None, spec: Path | None, executor: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Run only the preflight, as a job of its own, and print its findings.

    KEY=VALUE overrides a key of the spec, such as slurm.nodelist=node3 or preflight.bandwidth=fail. Exits with 0 if no
    check failed, else with 1. It also uses nodes of the ledger. Ctrl-C ends the job.
    """
    from slurmtrain.cli.progress_bars import run_progress
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
    return 0 if completed and not describe.has_failed(findings) else 1


def _details(workspace: Workspace, run_id: str, listed: Any) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The run as ``show`` prints it, and the findings of its preflight by host."""
    from slurmtrain.ops.shared.run_details import findings_json, show_json

    run = workspace.store.load(run_id)
    assert run is not None
    return show_json(workspace, listed, run), findings_json(workspace, run)


def _print(run: dict[str, Any], findings: dict[str, list[dict[str, Any]]]) -> None:
    newest = run["attempts"][-1] if run["attempts"] else None
    if findings:
        tables.print_table(describe.CHECK_HEADERS, describe.check_rows(findings))
    if newest is not None and (rows := describe.network_rows(newest["network"])):
        output.echo()
        tables.print_table(describe.NETWORK_HEADERS, rows)
        for line in describe.excluded_addresses(newest["network"]):
            output.paragraph(f"left out: {line}", "  ")
    if newest is not None and newest["clock"]:
        output.echo("", f"clocks ahead of node 0's: {describe.describe_clocks(newest['clock'])}")
    if run["state"] != "completed":
        output.echo(f"run {run['id']} is {run['state']}: {formatting.localized(run['reason'])}", err=True)
    elif not findings:
        output.echo(f"run {run['id']} reported no checks", err=True)


@options.command("nodes --all", cls=click.Group, invoke_without_command=True)
@click.option("--all", "inactive_too", is_flag=True, help="List all findings, also expired and forgiven ones.")
@options.json_option
def nodes(workspace: Workspace, inactive_too: bool, as_json: bool) -> int:
    """List the nodes that failed a preflight and that submissions exclude, each with its last finding.

    A finding expires after a day, or node_expiry_hours of slurmtrain.yaml.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    from slurmtrain.ops.shared.ledger_file import nodes_json
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import now_iso

    output.warn_about(observe(workspace, ask_slurm=False))
    nodes = nodes_json(workspace, inactive_too=inactive_too)
    if as_json:
        output.print_json({"schema": 1, "as_of": now_iso(), "nodes": nodes})
    elif nodes:
        tables.print_table(("NODE", "STATE", "SEEN", "COUNTS UNTIL", "RUN (ATTEMPT)", "REASON"), _rows(nodes))
    else:
        output.echo("no node has failed a preflight" + ("" if inactive_too else " lately"), err=True)
    return 0


def _rows(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for all nodes with the same finding, whatever its figures."""
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for node in nodes:
        seen_at, until = formatting.when(node["seen_at"]), formatting.when(node["expires_at"])
        reason = formatting.localized(node["reason"])
        finding = (node["state"], seen_at, until, f"{node['run_id']} ({node['attempt']})")
        alike.setdefault((*finding, describe.pattern(reason)), []).append((node["host"], reason))
    return [
        (formatting.describe_nodes(host for host, _ in reasons), *finding, describe.merge(reasons))
        for (*finding, _), reasons in alike.items()
    ]


@options.command("nodes forgive node[3-4]", group=nodes, short_help="Use nodes again.")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
def forgive(workspace: Workspace, names: tuple[str, ...]) -> int:
    """Use each NODE, or list of nodes such as node[1-3], again, until a later preflight fails there."""
    from slurmtrain.ops.shared.ledger_file import forgive
    from slurmtrain.ops.shared.observe import observe

    output.warn_about(observe(workspace, ask_slurm=False))
    output.echo(f"forgiven: {', '.join(forgive(workspace, names))}", err=True)
    return 0
