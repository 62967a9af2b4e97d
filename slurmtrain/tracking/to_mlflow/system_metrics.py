"""Sending what the nodes of a run have measured of themselves, as ``system/<node>/<name>``.

How far that went is in a tag of the MLflow run, which is set afterwards: whatever is sent twice is stored once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from slurmtrain.model.run.events.values import is_whole
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.system.journal_files import JournalFile, read_pieces
from slurmtrain.tracking.to_mlflow.names import legal_name

_TAG = "slurmtrain.system_metrics"
# The charts of more nodes would hide each other, and MLflow shows a page for each name.
_NODES = 16
_METRICS_A_CALL = 1000
_FILE = re.compile(r"system-([0-9]{1,9})\.jsonl")


class _Place(NamedTuple):
    """How far the files of an attempt have been sent, in bytes by node; earlier attempts' files are complete."""

    attempt: int
    offsets: dict[str, int]


class _Measured(NamedTuple):
    name: str
    value: float
    at_ms: int
    step: int


def send_system_metrics(client: Any, shown: Any, run: Run, directory: RunDir) -> None:
    """Send what is new in the files of a run's nodes.

    Args:
        client: MLflow's.
        shown: The MLflow run.
        run: The run.
        directory: Its directory.
    """
    mlflow_id, place = shown.info.run_id, _place(shown.data.tags.get(_TAG, ""))
    for attempt in run.attempts:
        files = _files(directory.attempt(attempt.job_id, attempt.restart))
        if attempt.number < place.attempt:
            continue
        offsets = dict(place.offsets) if attempt.number == place.attempt else {}
        new = {node: file for node, file in files.items() if file.size > offsets.get(node, 0)}
        for node, file in new.items():
            offsets[node] = _send(client, mlflow_id, attempt, (node, file), offsets.get(node, 0))
        if new:
            place = _Place(attempt.number, offsets)
            client.set_tag(mlflow_id, _TAG, json.dumps(place))


def _files(attempt: AttemptDir) -> dict[str, JournalFile]:
    """The files of the first nodes of an attempt, by the number of the node."""
    files = {}
    with suppress(OSError):
        for path in attempt.logs.iterdir():
            if match := _FILE.fullmatch(path.name):
                files[match[1]] = JournalFile(path.name, str(path), path.lstat().st_size)
    return {node: files[node] for node in sorted(files, key=int)[:_NODES]}


def _place(text: str) -> _Place:
    with suppress(ValueError, TypeError, AttributeError):
        attempt, offsets = json.loads(text)
        return _Place(int(attempt), {str(node): int(offset) for node, offset in offsets.items()})
    return _Place(0, {})


def _send(client: Any, mlflow_id: str, attempt: Attempt, measured: tuple[str, JournalFile], offset: int) -> int:
    """Send a node's file from ``offset`` on; returns how far that went, in bytes."""
    from mlflow.entities import Metric

    node, file = measured
    host = attempt.hosts.get(node, "node")
    # Several nodes of a local run are one machine.
    name = host if [*attempt.hosts.values()].count(host) == 1 else f"{host}-{node}"
    for piece in read_pieces(file, offset):
        values = [value for _, record in piece.reading.records for value in _values(name, attempt, record)]
        for start in range(0, len(values), _METRICS_A_CALL):
            client.log_batch(mlflow_id, metrics=[Metric(*value) for value in values[start : start + _METRICS_A_CALL]])
        offset = piece.reading.end
    return offset


def _values(node: str, attempt: Attempt, record: Any) -> Iterator[_Measured]:
    """The figures in a line; without a step, seconds since the attempt began stand for it."""
    time, metrics = float(record["t"]), record.get("metrics")
    step = record.get("step")
    if not is_whole(step):
        step = max(0, int(time - (attempt.started_at or time)))
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, int | float):
            yield _Measured(legal_name(f"system/{node}/{name}"), float(value), max(0, int(time * 1000)), step)
