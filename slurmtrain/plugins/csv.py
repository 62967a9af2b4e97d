"""Runs as CSV files: a file for each, with the surviving line of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.tracking.step_file import StepFile
from slurmtrain.tracking.tracker import Begun, FileTracker, Start, TrackedPoint, TrackedRun, WrittenFiles


class CsvTracker(FileTracker):
    """A directory with a file for each run."""

    waits: ClassVar[bool] = False
    usual: ClassVar[str] = "csv"
    kind: ClassVar[str] = "CSV files"

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._file = StepFile(self._directory)

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        self._file = StepFile(self._directory / f"{tracked.run.id}.csv")
        with self._writing():
            return Begun(tracked.run.id, self._file.keep(start.step))

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        with self._writing():
            self._file.append(points)
        return {}

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""

    @classmethod
    def files_of(cls, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
        """As :meth:`FileTracker.files_of` with its ``settings``, ``root`` and ``run_id``."""
        directory = cls._directory_of(settings, root)
        return WrittenFiles(directory, StepFile(directory / f"{run_id}.csv").files())
