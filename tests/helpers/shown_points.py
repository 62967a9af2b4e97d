"""The points that trackers show, as other programs read them, and the form in which each tracker keeps a point."""

from __future__ import annotations

import csv
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Point = tuple[str, int, float, float]
"""The name of a metric, the step, when it was logged, in seconds since 1970, and the value."""
MlflowPoint = tuple[str, int, int, float]
"""The same, with milliseconds."""


class InMlflow(NamedTuple):
    """What MLflow shows: under the metrics' names, under ``replayed/`` and under ``live/``."""

    surviving: set[MlflowPoint]
    replayed: set[MlflowPoint]
    live: set[MlflowPoint]


def in_mlflow(uri: str, run_id: str, names: Sequence[str]) -> InMlflow | None:
    """The points of these metrics in the only MLflow run of a run, each of them once; None if there is no such run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    mirrors = client.search_runs(experiments, f"tags.`slurmtrain.run_id` = '{run_id}'")
    if not mirrors:
        return None
    assert len(mirrors) == 1
    mlflow_id, present = mirrors[0].info.run_id, mirrors[0].data.metrics

    def points(prefix: str) -> set[MlflowPoint]:
        listed = [
            (name, each.step, each.timestamp, each.value)
            for name in names if f"{prefix}{name}" in present
            for each in client.get_metric_history(mlflow_id, f"{prefix}{name}")
        ]  # fmt: skip
        assert len(listed) == len(set(listed))
        return set(listed)

    return InMlflow(points(""), points("replayed/"), points("live/"))


def mlflow_form(point: Point) -> MlflowPoint:
    """A point as MLflow has it."""
    name, step, time, value = point
    return name, step, int(time * 1000), value


def in_csv(path: Path, names: Sequence[str]) -> list[tuple[str, int, float]]:
    """The points of these metrics in a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(name, int(row["step"]), float(row[name])) for row in rows for name in names if row.get(name)]


def csv_form(point: Point) -> tuple[str, int, float]:
    """A point as a CSV file has it: the time there is that of all metrics of a step."""
    name, step, _, value = point
    return name, step, value


def in_tensorboard(folder: Path) -> list[Point]:
    """What TensorBoard shows of a folder; nothing if it does not exist."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.exists():
        return []
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    shown = [(name, accumulator.Scalars(name)) for name in accumulator.Tags()["scalars"]]
    return [(name, each.step, each.wall_time, each.value) for name, events in shown for each in events]


def tensorboard_form(point: Point) -> Point:
    """A point as TensorBoard has it: values have 32 bits."""
    name, step, time, value = point
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return name, step, time, rounded
