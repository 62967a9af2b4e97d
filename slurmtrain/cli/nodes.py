"""``slurmtrain nodes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from slurmtrain.cli.describe import node_lists
from slurmtrain.cli.shared import options, output, tables, times
from slurmtrain.ops.shared.workspace import Workspace


@click.group(
    "nodes",
    short_help="List nodes that failed a preflight.",
    invoke_without_command=True,
    epilog=options.examples("nodes --all"),
)
@click.option("--all", "inactive_too", is_flag=True, help="List all findings, also expired and forgiven ones.")
@options.json_option
@options.in_workspace
def command(workspace: Workspace, inactive_too: bool, as_json: bool) -> int:
    """List the nodes that failed a preflight and that submissions exclude, each with its last finding.

    A finding expires after a day, or node_expiry_hours of slurmtrain.yaml.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    from slurmtrain.ops.shared.node_ledger import nodes_json
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
        seen_at, until = times.when(node["seen_at"]), times.when(node["expires_at"])
        reason = times.localized(node["reason"])
        finding = (node["state"], seen_at, until, f"{node['run_id']} ({node['attempt']})")
        alike.setdefault((*finding, node_lists.pattern(reason)), []).append((node["host"], reason))
    return [
        (node_lists.describe_nodes(host for host, _ in reasons), *finding, node_lists.merge(reasons))
        for (*finding, _), reasons in alike.items()
    ]


@command.command("forgive", short_help="Use nodes again.", epilog=options.examples("nodes forgive node[3-4]"))
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@options.in_workspace
def forgive(workspace: Workspace, names: tuple[str, ...]) -> int:
    """Use each NODE, or list of nodes such as node[1-3], again, until a later preflight fails there."""
    from slurmtrain.ops.shared.node_ledger import forgive
    from slurmtrain.ops.shared.observe import observe

    output.warn_about(observe(workspace, ask_slurm=False))
    output.echo(f"forgiven: {', '.join(forgive(workspace, names))}", err=True)
    return 0
