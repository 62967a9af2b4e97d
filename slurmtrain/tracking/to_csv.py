"""Runs as CSV files: a file for each, with the surviving line of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slurmtrain.errors import TrackingError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.files import describe_os_error
from slurmtrain.tracking.step_file import StepFile
from slurmtrain.tracking.tracker import Begun, Start, TrackedPoint, TrackedRun, Tracker


class CsvTracker(Tracker):
    """A directory with a file for each run. Its setting ``dir`` is relative to the runs root."""

    truncates: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._directory = root.path / Path(settings.get("dir") or "csv").expanduser()
        self.uri = self._directory.absolute().as_uri()
        self.label = f"the directory {self._directory} for CSV files"
        self._file = StepFile(self._directory)

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        self._file = StepFile(self._directory / f"{tracked.run.id}.csv")
        try:
            return Begun(tracked.run.id, self._file.keep(start.step))
        except (OSError, ValueError) as error:
            raise TrackingError(f"cannot write {self._file.path}: {_reason(error)}") from error

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        try:
            self._file.append(points)
        except (OSError, ValueError) as error:
            raise TrackingError(f"cannot write {self._file.path}: {_reason(error)}") from error
        return {}

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""


def _reason(error: Exception) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else str(error)
