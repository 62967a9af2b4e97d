"""Runs as event files of TensorBoard, which show the surviving line of their metrics.

``SummaryWriter(purge_step=...)`` only hides the events of steps that are trained again, and other readers of the files
show both. So the events of a run are appended to one file. After a rollback, and after a command was killed while it
wrote, a new file is written and the old one emptied. A new file begins with a start of a session at step 0, which makes
a running TensorBoard drop all events of the old file; it would never look at the new file if the old one were deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar

from slurmtrain.model.metrics.settled import Fate
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.files import make_directory, read_json, write_atomically, write_json
from slurmtrain.system.owned_files import open_regular
from slurmtrain.tracking.tracker import Begun, FileTracker, Start, TrackedPoint, TrackedRun, WrittenFiles

# What TensorBoard recognises event files by; they are read in the order of their names.
_NAME = "events.out.tfevents.{:010d}.slurmtrain"
# A script may write files of its own to the same folder.
_OURS = "events.out.tfevents.*.slurmtrain"
_EVENT_FILE = r"\.?events\.out\.tfevents\.[0-9]{10}\.slurmtrain(?:\.[0-9a-f]{8}\.tmp)?"
_STATE = "slurmtrain.json"
_FORMAT = "brain.Event:2"


class TensorboardTracker(FileTracker):
    """A directory with a folder for each run."""

    waits: ClassVar[bool] = False
    usual: ClassVar[str] = "tensorboard"
    kind: ClassVar[str] = "TensorBoard"
    package: ClassVar[str] = "tensorboard"

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._folder = self._file = self._directory
        self._step: int | None = None

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        with self._writing():
            self._folder = self._directory / tracked.run.id
            make_directory(self._folder)
            state = read_json(self._folder / _STATE) or {}
            self._file = self._folder / str(state.get("file"))
            self._step = start.step
            whole = self._file.is_file() and self._file.stat().st_size == state.get("bytes")
            if whole and start.step is not None and state.get("step") == start.step:
                return Begun(tracked.run.id, start.step)
            # First, so that what is written from now on is not taken for what the state describes.
            (self._folder / _STATE).unlink(missing_ok=True)
            numbers = [path.name.split(".")[3] for path in self._folder.glob(_OURS)]
            newest = max((int(number) for number in numbers if number.isdigit()), default=0)
            self._file = self._folder / _NAME.format(newest + 1)
            self._step = None
            with os.fdopen(open_regular(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                _write_event(file, Event(file_version=_FORMAT))
                _write_event(file, Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        return Begun(tracked.run.id)

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        final = [point for point in points if point.fate is Fate.FINAL]
        with self._writing(), self._opened() as file:
            for point in final:
                values = [Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()]
                _write_event(file, Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
                self._step = point.step
        return {}

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""
        del tracked
        with self._writing():
            state = {"file": self._file.name, "bytes": self._file.stat().st_size, "step": self._step}
            write_json(self._folder / _STATE, state)
            # After the state: a kill in between leaves the old events, which the next call then drops.
            for path in self._folder.glob(_OURS):
                if path != self._file and path.stat().st_size:
                    write_atomically(path, b"")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with os.fdopen(open_regular(self._file, os.O_WRONLY | os.O_APPEND), "ab") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def files_of(cls, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
        """As :meth:`FileTracker.files_of` with its ``settings``, ``root`` and ``run_id``."""
        directory = cls._directory_of(settings, root)
        ours = re.compile(rf"{re.escape(run_id)}/(?:{_EVENT_FILE}|\.?{re.escape(_STATE)}(?:\.[0-9a-f]{{8}}\.tmp)?)")

        def is_foreign(path: str) -> bool:
            return ours.fullmatch(path) is None

        try:
            entries = os.listdir(directory / run_id)
        except OSError:
            entries = []
        is_empty = all(is_foreign(f"{run_id}/{each}") for each in entries)
        return WrittenFiles(directory, [] if is_empty else [run_id], is_foreign)


def _write_event(file: BinaryIO, event: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    RecordWriter(file).write(event.SerializeToString())
