"""The lines that a run has logged, read from its metrics files as often as they are needed: there may be millions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slurmtrain.model.metrics.settled import Attempted, LoggedLine
from slurmtrain.model.metrics.survival import start_of
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.progress import read_point
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import JournalFile, journal_files, read_pieces

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
