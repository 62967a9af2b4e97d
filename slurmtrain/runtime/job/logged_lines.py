"""The lines that a run has logged, read from its metrics files as often as they are needed: there may be millions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurmtrain.errors import UntrustedPath
from slurmtrain.model.metrics.curves import start_of
from slurmtrain.model.metrics.settled import Attempted, LoggedLine
from slurmtrain.model.run.attempt_progress import Point, points_of, read_point
from slurmtrain.model.run.journal_lines import read_lines
from slurmtrain.model.run.layout import METRICS, RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import JournalFile, journal_files, read_pieces
from slurmtrain.system.owned_files import open_regular

# Enough to read fast, and little memory for any number of lines.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoggedLines:
    """A run's attempts with their metrics files, as long as these are at one moment."""

    attempts: Sequence[Attempted]
    names: Mapping[int, str]
    """The metrics file of each attempt, relative to the run directory."""


def logged_lines(run: Run, directory: RunDir) -> LoggedLines:
    """The lines of a run; nothing is read yet. Raises RunUnreadable."""
    files = {file.metrics_of: file for file in journal_files(directory) if file.metrics_of is not None}
    attempts = [Attempted(start_of(attempt), partial(_lines, files.get(attempt.key))) for attempt in run.attempts]
    names = {attempt.number: files[attempt.key].name for attempt in run.attempts if attempt.key in files}
    return LoggedLines(attempts, names)


def _lines(file: JournalFile | None, offset: int) -> Iterator[LoggedLine]:
    if file is None or file.size <= offset:
        return
    for piece in read_pieces(file, offset, length=_PIECE_BYTES):
        points = ((at, point) for at, record in piece.reading.records if (point := read_point(record)) is not None)
        previous = None
        for at, point in points:
            if previous is not None:
                yield LoggedLine(previous[0], at, previous[1])
            previous = (at, point)
        if previous is not None:
            yield LoggedLine(previous[0], piece.reading.end, previous[1])


# So much of a file is read at a time: many lines.
_WINDOW_BYTES = 1 << 16


def logged_step(run: RunDir, at: float) -> int | None:
    """The last step that any attempt of a run had logged by a time; None if none had.

    Args:
        run: The run.
        at: In seconds since 1970.
    """
    points = [point for path in run.attempts.glob(f"*/{METRICS}") if (point := _last_before(path, at)) is not None]
    return max(points, key=lambda point: point.time).step if points else None


def _last_before(metrics: Path, at: float) -> Point | None:
    with contextlib.suppress(OSError, UntrustedPath):
        handle = open_regular(metrics)
        try:
            return _search(handle, at, metrics.name)
        finally:
            os.close(handle)
    return None


def _search(handle: int, at: float, name: str) -> Point | None:
    """Halve the part of the file that the point is in until one window holds it: lines are in the order of time."""
    begin, end = 0, os.fstat(handle).st_size
    while end - begin > _WINDOW_BYTES:
        middle = (begin + end) // 2
        points = _points(handle, middle, _WINDOW_BYTES, name)
        if points and points[0].time <= at:
            begin = middle
        else:
            end = middle
    # The line that ends the last window begins before it does.
    points = _points(handle, begin, end - begin + _WINDOW_BYTES, name)
    return next((point for point in reversed(points) if point.time <= at), None)


def _points(handle: int, offset: int, length: int, name: str) -> list[Point]:
    return points_of(record for _, record in read_lines(os.pread(handle, length, offset), offset, name).records)
