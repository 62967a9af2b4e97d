"""``slurmtrain metrics``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmtrain.cli import options, output
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.owned_files import user_name

if TYPE_CHECKING:
    from slurmtrain.plugins.prometheus.collect import Collection
    from slurmtrain.plugins.prometheus.counters import Counters

_ADDRESS = re.compile(r"(?:(?P<host>\[[^\]]+\]|[^:]+):)?(?P<port>[0-9]{1,5})")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def _read_address(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """The host and the port in ``text``."""
    if text is None:
        return None
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise click.BadParameter(f"{text!r} is neither a port, such as 9108, nor HOST:PORT")
    return (match["host"] or "127.0.0.1").strip("[]"), int(match["port"])


def _read_labels(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """The labels in ``texts``, by name."""
    from slurmtrain.plugins.prometheus.collect import LABELS

    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _LABEL.fullmatch(name):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE, such as project=vision")
        if name in LABELS:
            raise click.BadParameter(f"{name!r} is a label of slurmtrain's own; choose another name")
        labels[name] = value
    return labels


@options.command(
    "metrics",
    "metrics --textfile /var/lib/node_exporter/ada.prom",
    "metrics --serve 9108",
    "metrics --dashboard",
    looks=True,
)
@click.option("--textfile", metavar="FILE", type=click.Path(path_type=Path), help="Write a file for the node exporter.")
@click.option("--serve", "address", metavar="[HOST:]PORT", callback=_read_address, help="Serve them until Ctrl-C.")
@click.option("--label", "labels", metavar="NAME=VALUE", multiple=True, callback=_read_labels, help="A label for all.")
@click.option("--no-runs", is_flag=True, help="Leave out the series of single runs, and so their names.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana instead.")
@options.json_option
def metrics_command(
    workspace: Workspace, textfile: Path | None, address: tuple[str, int] | None, labels: dict[str, str],
    no_runs: bool, dashboard: bool, as_json: bool,
) -> int:  # fmt: skip
    """Export the state of all runs to Prometheus: print it, write it to a file, or serve it.

    It observes runs as 'status' does, and starts and ends none. docs/monitoring.md explains the metrics.

    --textfile replaces FILE in a directory that a node exporter reads; call it every minute. FILE can be read by
    everybody, as the exporter has an account of its own. --serve listens on this machine only unless HOST is an address
    of another network; Slurm is asked at most every slurm_interval.
    """
    if sum(map(bool, (textfile, address, dashboard, as_json))) > 1:
        raise click.UsageError("give only one of --textfile, --serve, --dashboard and --json")
    if dashboard:
        from slurmtrain.plugins.prometheus.exposition import read_dashboard

        output.verbatim(*read_dashboard().splitlines())
        return 0
    from slurmtrain.plugins.prometheus.counters import Counters
    from slurmtrain.plugins.prometheus.exposition import check_client, check_textfile, text_of, write_textfile

    workspace = workspace.looking_again()
    labels = {"user": user_name(os.geteuid()), **labels}
    if not as_json:
        check_client()
    if textfile is not None:
        check_textfile(textfile)
    if address is not None:
        return _serve(workspace, address, labels, per_run=not no_runs)
    collection = _collect(workspace, Counters(), per_run=not no_runs)
    output.warn(collection.notes)
    if as_json:
        output.print_json({**collection.to_json(), "labels": labels})
    elif textfile is None:
        # Not splitlines(), which knows more ends of lines than Prometheus.
        output.verbatim(*text_of(collection, labels).rstrip("\n").split("\n"))
    else:
        write_textfile(textfile, text_of(collection, labels))
    return 0


def _collect(workspace: Workspace, counters: Counters, *, per_run: bool) -> Collection:
    from slurmtrain.plugins.prometheus.collect import collect

    return collect(workspace, counters, per_run=per_run)


def _serve(workspace: Workspace, address: tuple[str, int], labels: dict[str, str], *, per_run: bool) -> int:
    from slurmtrain.ops.shared.interrupt import StopSignal
    from slurmtrain.plugins.prometheus.counters import Counters
    from slurmtrain.plugins.prometheus.exposition import LatestCollection, serving
    from slurmtrain.tracking.to_mlflow.server import is_loopback

    host, port = address
    if not is_loopback(host):
        output.warn([f"everybody who can connect to {host} can read the names and the state of these runs"])
    counters = Counters()

    def collect_again() -> Collection:
        # Another command may have replaced the registry meanwhile.
        again = workspace.looking_again()
        try:
            return _collect(again, counters, per_run=per_run)
        finally:
            again.close()

    latest = LatestCollection(collect_again, workspace.config.slurm_interval, lambda note: output.warn([note]))
    with serving(latest, host, port, labels) as bound:
        output.echo(f"http://{f'[{host}]' if ':' in host else host}:{bound}/metrics")
        output.echo("Ctrl-C ends it", err=True)
        with StopSignal() as stop:
            while not stop.wait(3600.0):
                pass
    return 0
