"""Runs as CSV files: a file for each, with the surviving line of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slurmtrain.errors import TrackingError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.files import describe_os_error
from slurmtrain.tracking.step_file import StepFile
from slurmtrain.tracking.tracker import Begun, Start, TrackedPoint, TrackedRun, Tracker, WrittenFiles


class CsvTracker(Tracker):
    """A directory with a file for each run. Its setting ``dir`` is relative to the runs root."""

    truncates: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._directory = _directory(settings, root)
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


def written_files(settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
    """What there is of a run.

    Args:
        settings: The section of the spec.
        root: The runs root.
        run_id: The run.
    """
    directory = _directory(settings, root)
    return WrittenFiles(directory, StepFile(directory / f"{run_id}.csv").files())


def _directory(settings: Mapping[str, Any], root: RunsRoot) -> Path:
    return root.path / Path(settings.get("dir") or "csv").expanduser()


def _reason(error: Exception) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else str(error)
