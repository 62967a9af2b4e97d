"""What the live sender of a run has sent to MLflow, in a file of the run directory: it has no registry."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.metrics.settled import Place
from slurmtrain.model.run.layout import RunDir
from slurmtrain.system.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class LivePlace:
    """How far the live sender has come, with the MLflow run ``mlflow_run_id`` of the server at ``uri``."""

    uri: str
    mlflow_run_id: str
    place: Place = field(default_factory=Place)

    def is_of(self, other: LivePlace) -> bool:
        """Whether ``other`` is a place of the same MLflow run."""
        return (self.uri, self.mlflow_run_id) == (other.uri, other.mlflow_run_id)


def read_place(run: RunDir) -> LivePlace | None:
    """What a run's live sender has sent; None if there is none, or its file cannot be used."""
    try:
        data = read_json(run.live_metrics)
        return None if data is None else _from_json(data)
    except (PathError, KeyError, TypeError, ValueError):
        return None


def write_place(run: RunDir, live: LivePlace) -> None:
    """Replace the file of a ``run``, durably. Raises OSError."""
    place = live.place
    data = {
        "uri": live.uri,
        "mlflow_run_id": live.mlflow_run_id,
        "offsets": {str(number): offset for number, offset in place.offsets.items()},
        "step": place.step,
        "until": place.until,
        "reach": place.reach,
        "sending": list(place.sending),
    }
    write_json(run.live_metrics, data, private=True)


def touch_place(run: RunDir, live: LivePlace) -> None:
    """Note that all of a ``run`` was sent that can be now, and how far that is. Raises OSError."""
    try:
        os.utime(run.live_metrics)
    except FileNotFoundError:
        write_place(run, live)


def _from_json(data: dict[str, Any]) -> LivePlace:
    attempt, offset = data["sending"]
    place = Place(
        {int(number): int(end) for number, end in data["offsets"].items()},
        data["step"],
        float(data["until"]),
        data["reach"],
        (int(attempt), int(offset)),
    )
    return LivePlace(str(data["uri"]), str(data["mlflow_run_id"]), place)
