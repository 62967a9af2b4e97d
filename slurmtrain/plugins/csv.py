"""Runs as CSV files: for each a file with the surviving line of its metrics, which can be cut off after any step.

Its columns are ``step``, ``time`` (seconds since 1970) and ``attempt``, then one for each metric in the order of first
logging. Rows are appended, in increasing order of steps. For anything else, such as a new column, the file is replaced
by a new one at once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slurmtrain.errors import PathError
from slurmtrain.model.metrics.settled import Fate
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.files import make_directory, write_atomically
from slurmtrain.system.owned_files import open_regular
from slurmtrain.tracking.tracker import Begun, FileTracker, Start, TrackedPoint, TrackedRun, WrittenFiles

_LEADING = ("step", "time", "attempt")
# Most rows are shorter.
_TAIL_BYTES = 1 << 16


class StepFile:
    """The file of one run."""

    def __init__(self, path: Path) -> None:
        """Use the file at ``path``, which need not exist."""
        self.path = path
        self._names: list[str] = []

    def keep(self, step: int | None) -> int | None:
        """Drop all rows after a step, or all for None; returns the step of the last row that is left, None for none."""
        names = None if step is None else self._read_names()
        if names is not None and step is not None:
            self._names = names
            # What is damaged is written anew.
            with contextlib.suppress(ValueError, csv.Error):
                newest, is_whole = self._newest()
                if newest is None or newest > step or not is_whole:
                    self._replace(row for row in self.rows() if int(row[0]) <= step)
                    newest, _ = self._newest()
                return newest
        self._names = []
        self._replace([])
        return None

    def append(self, points: Sequence[TrackedPoint]) -> None:
        """Add rows for the final ones among these points, whose steps are later than the file's."""
        rows_of: dict[int, tuple[tuple[int, float, int], dict[str, float]]] = {}
        for point in points:
            if point.fate is Fate.FINAL:
                # A step may have been logged in several lines.
                before = rows_of[point.step][1] if point.step in rows_of else {}
                rows_of[point.step] = ((point.step, point.time, point.attempt), {**before, **point.metrics})
        merged = list(rows_of.values())
        names = dict.fromkeys(name for _, metrics in merged for name in metrics)
        if new := [name for name in names if name not in self._names]:
            rows = list(self.rows())
            self._names += new
            self._replace(rows)
        lines = _csv_text([*leading, *(metrics.get(name, "") for name in self._names)] for leading, metrics in merged)
        with os.fdopen(open_regular(self.path, os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    @property
    def names(self) -> Sequence[str]:
        """The names of the metrics, in the order of their columns."""
        return self._names

    def rows(self) -> Iterator[list[str]]:
        """The rows, without the header; what a killed command has left of a row is passed over."""
        # Only a newline ends a line: the name of a metric may have any other character that is taken for an end of one.
        with os.fdopen(open_regular(self.path), "r", newline="\n", encoding="utf-8") as file:
            reader = csv.reader(line for line in file if line.endswith("\n"))
            next(reader, None)
            yield from (row for row in reader if row)

    def files(self) -> list[str]:
        """The names of the file, unless it is not ours, and of what killed commands have left of new ones."""
        names = files_named(self.path.parent, self.path.name)
        with contextlib.suppress(OSError, PathError):
            if self._read_names() is not None:
                return names
        return [name for name in names if name != self.path.name]

    def _read_names(self) -> list[str] | None:
        """The names of the metrics; None if there is no such file, or it is not one of ours."""
        try:
            with os.fdopen(open_regular(self.path), "r", newline="\n", encoding="utf-8") as file:
                header = next(csv.reader(file), [])
        except (FileNotFoundError, ValueError, csv.Error):
            return None
        return header[len(_LEADING) :] if header[: len(_LEADING)] == list(_LEADING) else None

    def _newest(self) -> tuple[int | None, bool]:
        """The step of the last whole row, None if there is none, and whether nothing follows it."""
        length, header = _TAIL_BYTES, len(self._header())
        with os.fdopen(open_regular(self.path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # The name of a metric may have line breaks, and look like a row.
            while size > header:
                file.seek(max(0, size - length))
                lines = file.read().split(b"\n")
                # The first one may be the end of a row.
                if len(lines) > 2 or length >= size:
                    break
                length *= 2
            else:
                return None, size == header
        step = lines[-2].partition(b",")[0] if len(lines) > 1 else b""
        return int(step) if step.isdigit() else None, not lines[-1]

    def _replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Replace the file at once. Rows that have fewer columns than there are names are filled up."""
        width = len(_LEADING) + len(self._names)
        filled = ([*row, *[""] * (width - len(row))] for row in rows)
        make_directory(self.path.parent)
        write_atomically(self.path, self._header() + _csv_text(filled))

    def _header(self) -> bytes:
        # Before Python 3.13 a carriage return alone is not put into quotes, and not read without.
        quoting = csv.QUOTE_ALL if any("\r" in name for name in self._names) else csv.QUOTE_MINIMAL
        return _csv_text([[*_LEADING, *self._names]], quoting)


def files_named(directory: Path, *names: str) -> list[str]:
    """The entries ``names`` of a ``directory`` that exist, and leftovers of new ones from killed commands."""
    pattern = re.compile("|".join(rf"{re.escape(name)}|\.{re.escape(name)}\.[0-9a-f]{{8}}\.tmp" for name in names))
    try:
        return sorted(filter(pattern.fullmatch, os.listdir(directory)))
    except OSError:
        return []


def _csv_text(rows: Iterable[Sequence[object]], quoting: int = csv.QUOTE_MINIMAL) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(rows)  # type: ignore[arg-type]
    # Names of metrics may have lone surrogates, which UTF-8 has no bytes for.
    return text.getvalue().encode(errors="backslashreplace")


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
