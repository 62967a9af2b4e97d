"""Handing metrics to Prometheus: its text format, a file for the node exporter, an endpoint; a dashboard for Grafana.

The only user of prometheus_client, which is an extra.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import NotAvailable, PathError, SlurmtrainError, UserError
from slurmtrain.plugins.prometheus.collect import COUNTER, SUMMARY, Collection, Family
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.interpreter import template_directory

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
        return (_metric(family, self.labels) for family in self.collect_families() if family.samples)

    def describe(self) -> list[Metric]:
        """No names in advance: prometheus_client would collect to learn them."""
        return []


def check_client() -> None:
    """Raise NotAvailable if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"metrics need prometheus_client ({error}): pip install 'slurmtrain[prometheus]'") from error


def text_of(collection: Collection, labels: Mapping[str, str]) -> str:
    """A ``collection`` in Prometheus' text format, with these constant ``labels``. Raises NotAvailable."""
    check_client()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(lambda: collection.families, labels))
    return generate_latest(registry).decode()


def check_textfile(path: Path) -> None:
    """Raise UserError if the node exporter ignores files with the suffix of ``path``."""
    if path.suffix != SUFFIX:
        raise UserError(f"{path}: the node exporter reads only files whose names end in {SUFFIX}; choose such a name")


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
                self._tried_at = now
                self._renew()
            return self._families

    def _renew(self) -> None:
        try:
            collection = self._collect()
            self._families, notes = collection.families, collection.notes
        except (SlurmtrainError, OSError) as error:
            notes = (str(error),)
        for note in notes:
            if note not in self._notes:
                self._warn(note)
        self._notes = notes


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


def _metric(family: Family, constant: Mapping[str, str]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    kinds: Mapping[str, Any] = {COUNTER: CounterMetricFamily, SUMMARY: SummaryMetricFamily}
    names = [*constant, *family.labels]
    metric: Metric = kinds.get(family.kind, GaugeMetricFamily)(family.name, family.help, labels=names)
    for labels, values in family.samples.items():
        metric.add_metric([*constant.values(), *labels], *values)  # type: ignore[attr-defined]
    return metric


def dashboard_path() -> Path:
    """Where it is."""
    return template_directory() / "grafana" / "slurmtrain.json"


def read_dashboard() -> str:
    """Its JSON, which Grafana imports. Raises PathError."""
    try:
        return dashboard_path().read_text().rstrip("\n")
    except OSError as error:
        raise PathError(f"cannot read {dashboard_path()}: {describe_os_error(error)}") from error
