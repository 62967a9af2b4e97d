"""The histories of a run's metrics, read from the files of its attempts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from slurmtrain.model.metrics.curves import Curve, CurveBuilder
from slurmtrain.model.metrics.survival import start_of
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.progress import Point, points_of
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import JournalFile, journal_files, read_pieces

# Enough to read fast, and little memory for any number of lines.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class History:
    """What a run has logged, by metric. ``problems``: files that cannot be read, with the reasons."""

    curves: Mapping[str, Curve]
    problems: tuple[str, ...] = ()


def read_history(
    run: Run, directory: RunDir, names: Collection[str] | None = None, *, keep_superseded: bool = False
) -> History:
    """The curves of a run's metrics, without what was rolled back. Files are read in pieces, whatever their size.

    Args:
        run: The run, with its attempts.
        directory: Its directory.
        names: The metrics to read; None: all.
        keep_superseded: Keep what was rolled back too, beside the rest.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    problems: list[str] = []
    files = {file.metrics_of: file for file in journal_files(directory, problems) if file.metrics_of is not None}
    builder = CurveBuilder(names, keep_superseded=keep_superseded)
    for attempt in run.attempts:
        file = files.get(attempt.key)
        builder.add_attempt(start_of(attempt), _points(file) if file is not None else ())
    return History(builder.curves, tuple(problems))


def _points(file: JournalFile) -> Iterator[Point]:
    for piece in read_pieces(file, length=_PIECE_BYTES):
        yield from points_of(record for _, record in piece.reading.records)
