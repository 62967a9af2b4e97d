"""``slurmtrain metrics`` hands metrics to Prometheus: as text, in a file for the node exporter, through an endpoint.

The only user of prometheus_client, which is an extra.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmtrain.cli import options, output
from slurmtrain.errors import NotAvailable, PathError, SlurmtrainError, UserError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus.counters import Counters
from slurmtrain.plugins.prometheus.families import COUNTER, LABELS, SUMMARY, Collection, Family, collect
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.interpreter import template_directory
from slurmtrain.system.owned_files import user_name

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SUFFIX = ".prom"
# The node exporter runs under an account of its own.
READABLE = 0o644


@dataclass(frozen=True, slots=True, eq=False)
class _Collector:
    """Answers prometheus_client with families. ``labels``: constant ones, which every sample gets."""

    collect_families: Callable[[], tuple[Family, ...]]
    labels: Mapping[str, str]

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        kinds: Mapping[str, Any] = {COUNTER: CounterMetricFamily, SUMMARY: SummaryMetricFamily}
        for family in self.collect_families():
            if family.samples:
                names = [*self.labels, *family.labels]
                metric = kinds.get(family.kind, GaugeMetricFamily)(family.name, family.help, labels=names)
                for labels, values in family.samples.items():
                    metric.add_metric([*self.labels.values(), *labels], *values)
                yield metric

    def describe(self) -> list[Metric]:
        """No names in advance: prometheus_client would collect to learn them."""
        return []


def check_client() -> None:
    """Raise NotAvailable if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"metrics need prometheus_client ({error}): pip install 'slurmtrain[prometheus]'") from error


def exposition_text(collection: Collection, labels: Mapping[str, str]) -> str:
    """A ``collection`` in Prometheus' text format, with these constant ``labels``. Raises NotAvailable."""
    check_client()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(lambda: collection.families, labels))
    return generate_latest(registry).decode()


def check_textfile(path: Path) -> None:
    """Raise UserError if the node exporter ignores files with the suffix of ``path``."""
    if path.suffix != SUFFIX:
        raise UserError(f"{path}: the node exporter only reads files whose names end in {SUFFIX}; rename it")


def write_textfile(path: Path, text: str) -> None:
    """Replace the file that a node exporter reads, which anybody may read.

    Args:
        path: The file, in the directory that the exporter was given with ``--collector.textfile.directory``.
        text: The metrics.

    Raises:
        PathError: It cannot be written.
    """
    try:
        write_atomically(path, text.encode(), mode=READABLE)
    except OSError as error:
        raise PathError(f"cannot write {path}: {describe_os_error(error)}") from error


class LatestCollection:
    """Collects when it is asked, though at most once in a while, for several threads."""

    def __init__(self, collect: Callable[[], Collection], interval_s: float, warn: Callable[[str], None]) -> None:
        """Nothing has been collected.

        Args:
            collect: Collects everything.
            interval_s: The least time between two collections, in seconds.
            warn: Called with what the user should know, when it changes.
        """
        self._collect = collect
        self._interval_s = interval_s
        self._warn = warn
        self._lock = threading.Lock()
        self._families: tuple[Family, ...] = ()
        self._tried_at: float | None = None
        self._notes: tuple[str, ...] = ()

    def families(self) -> tuple[Family, ...]:
        """What was collected last; ``collection_timestamp_seconds`` says when, also if collecting has failed since."""
        with self._lock:
            now = time.monotonic()
            if self._tried_at is None or now - self._tried_at >= self._interval_s:
                # Noted before the attempt: if that fails, the next scrape must not repeat it at once.
                self._tried_at = now
                try:
                    collection = self._collect()
                    self._families, notes = collection.families, collection.notes
                except (SlurmtrainError, OSError) as error:
                    notes = (str(error),)
                for note in notes:
                    if note not in self._notes:
                        self._warn(note)
                self._notes = notes
            return self._families


@contextlib.contextmanager
def serving(latest: LatestCollection, host: str, port: int, labels: Mapping[str, str]) -> Iterator[int]:
    """Serve metrics over HTTP at any path, in threads, until the context is left; yields the port.

    Args:
        latest: What is served.
        host: The address to listen on.
        port: The port; 0: any that is free.
        labels: Constant labels.

    Raises:
        NotAvailable: prometheus_client is not installed.
        UserError: The address cannot be listened on.
    """
    check_client()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(latest.families, labels))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {describe_os_error(error)}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dashboard_path() -> Path:
    """Where it is."""
    return template_directory() / "grafana" / "slurmtrain.json"


def read_dashboard() -> str:
    """Its JSON, which Grafana imports. Raises PathError."""
    try:
        return dashboard_path().read_text().rstrip("\n")
    except OSError as error:
        raise PathError(f"cannot read {dashboard_path()}: {describe_os_error(error)}") from error


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
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _LABEL.fullmatch(name):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE, such as project=vision")
        if name in LABELS:
            raise click.BadParameter(f"slurmtrain uses the label {name!r} itself; choose another name")
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
@click.option("--no-runs", is_flag=True, help="Leave out the series of single runs, and with them their names.")
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
        output.verbatim(*read_dashboard().splitlines())
        return 0
    # A program may call this every minute: Slurm is asked rarely.
    workspace = workspace.looking_again()
    # By default, so that the runs of several users can be told apart.
    labels = {"user": user_name(os.geteuid()), **labels}
    # Before runs are read, which takes long the first time.
    if not as_json:
        check_client()
    if textfile is not None:
        check_textfile(textfile)
    if address is not None:
        return _serve_metrics(workspace, address, labels, per_run=not no_runs)
    collection = collect(workspace, Counters(), per_run=not no_runs)
    output.warn(collection.notes)
    if as_json:
        output.print_json({**collection.to_json(), "labels": labels})
    elif textfile is None:
        # Not splitlines(), which knows more ends of lines than Prometheus.
        output.verbatim(*exposition_text(collection, labels).rstrip("\n").split("\n"))
    else:
        write_textfile(textfile, exposition_text(collection, labels))
    return 0


def _serve_metrics(workspace: Workspace, address: tuple[str, int], labels: dict[str, str], *, per_run: bool) -> int:
    from slurmtrain.system.local_pages import is_loopback, place_of_page
    from slurmtrain.system.process import StopSignal

    host, port = address
    if not is_loopback(host):
        output.warn([f"anybody who can connect to {host} can read the names and states of these runs"])
    # The sums of this process, which are brought up to date by each collection.
    counters = Counters()

    def collect_again() -> Collection:
        # Another command may have replaced the registry meanwhile.
        again = workspace.looking_again()
        try:
            return collect(again, counters, per_run=per_run)
        finally:
            again.close()

    latest = LatestCollection(collect_again, workspace.config.slurm_interval, lambda note: output.warn([note]))
    with serving(latest, host, port, labels) as bound:
        output.echo(f"http://{place_of_page(host, bound)}/metrics")
        output.echo("Ctrl-C ends it", err=True)
        with StopSignal() as stop:
            # Any length would do: a signal ends the wait.
            while not stop.wait(3600.0):
                pass
    return 0
