"""The journals and metrics files of a run directory: where they are, whether they have grown, and what is new in them.

Commands continue reading where they last stopped; agents read from the start. Only regular files are opened. A journal
that cannot be read is an error (RunUnreadable): without it, a run that trains may look like one that was never started.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import PathError, RunUnreadable, UntrustedPath
from slurmtrain.model.metrics.columns import Block, block_of, read_plain_lines
from slurmtrain.model.run.events.base import is_text
from slurmtrain.model.run.journal_lines import Garbage, Point, Reading, garbage_of, points_of, read_lines, read_point
from slurmtrain.model.run.layout import ATTEMPTS, GUESSED_METRICS, JOURNALS, METRICS, RunDir, split_attempt
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import Check, check_directory, check_owned, kind_of, open_regular

# A directory changed more recently than this may change again with the same timestamp, since timestamps are coarse.
_COARSE_NS = 2_000_000_000
# Read at most this much of a file at once.
PIECE_BYTES = 16 * 2**20
# A longer line is passed over, by every reader, however much it reads at once.
LINE_LIMIT = PIECE_BYTES
# The time of a folder that cannot be looked at: different from any that was noted.
_UNKNOWN = -1
# How many problems the reason mentions.
_MENTIONED = 3


class JournalFile(NamedTuple):
    """A journal or a metrics file. ``name`` is its path relative to the run directory, ``size`` is in bytes."""

    name: str
    path: str
    size: int

    @property
    def metrics_of(self) -> str | None:
        """The name of the directory of the attempt whose metrics these are; None for a journal."""
        return self.name.split("/")[1] if self.name.endswith((f"/{METRICS}", f"/{GUESSED_METRICS}")) else None

    @property
    def is_guessed(self) -> bool:
        """Whether these are metrics that were guessed from a script's output: they are shown, and decide nothing."""
        return self.name.endswith(f"/{GUESSED_METRICS}")


def folder_times(run: Path | str) -> tuple[int, ...]:
    """Modification times (ns) of the folders that get new files; empty if the run directory is gone.

    Journals grow only while their writer lives, so for a run whose writers are all dead these reveal every change.
    """
    # Strings, not Paths: every command checks every run, and making a Path takes longer than a stat.
    times = (_time_of(f"{run}/{JOURNALS}"), _time_of(f"{run}/{ATTEMPTS}"))
    return times if any(times) or os.path.exists(run) else ()  # noqa: PTH110


def _time_of(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116
    except FileNotFoundError:
        return 0
    except OSError:
        return _UNKNOWN


def is_quiet(times: Iterable[int], now_ns: int) -> bool:
    """Whether folders with these ``times`` changed long enough before ``now_ns`` for any later change to show."""
    return all(now_ns - at > _COARSE_NS for at in times)


def journal_files(run: RunDir, problems: list[str] | None = None, *, check: Check = check_owned) -> list[JournalFile]:
    """Every journal and metrics file of a run; guessed metrics only of attempts that report none.

    Args:
        run: The run's directory, in a root that has been checked.
        problems: Receives what cannot be read, with the reason; None: that is an error.
        check: Who may own the directory or write to it.

    Raises:
        RunUnreadable: The directory does not pass ``check``, a folder cannot be listed, or a journal is not a regular
            file.
    """
    unreadable: list[str] = []
    try:
        check_directory(str(run.path), check=check)
    except PathError as error:
        raise RunUnreadable(str(error)) from error
    except OSError:
        pass  # listing it gives the reason
    files = _lines_in(run, JOURNALS, unreadable)
    for folder in _entries_in(run, ATTEMPTS, unreadable):
        if split_attempt(folder.name) is not None:
            inside = _lines_in(run, f"{ATTEMPTS}/{folder.name}", unreadable)
            reports = any(file.name.endswith(f"/{METRICS}") for file in inside)
            files += [file for file in inside if not (reports and file.is_guessed)]
    if unreadable and problems is None:
        raise RunUnreadable("; ".join(unreadable[:_MENTIONED]))
    if problems is not None:
        problems += unreadable
    return files


def has_unread(files: Iterable[JournalFile], offsets: Mapping[str, int]) -> bool:
    """Whether any of these ``files`` is longer or shorter than the part already read (``offsets``: bytes by name)."""
    return any(file.size != offsets.get(file.name, 0) for file in files)


@dataclass(frozen=True)
class Piece:
    """A piece of a file.

    ``text``: its bytes, starting at byte ``offset`` of the file called ``name``. ``end``: the offset after its last
    whole line, or after one that is too long to be read.
    """

    name: str
    text: bytes
    offset: int
    end: int

    @cached_property
    def reading(self) -> Reading:
        """What is in its whole lines."""
        reading = read_lines(self.text, self.offset, self.name)
        if reading.end == self.end:
            return reading
        garbage = garbage_of(self.name, self.offset, self.text, f"it is longer than {len(self.text)} bytes")
        return Reading((), (*reading.garbage, garbage), self.end)

    @property
    def whole_lines(self) -> bytes:
        """The bytes of its whole lines."""
        return self.text[: self.end - self.offset]

    def line(self, offset: int) -> str:
        """The unmodified line that begins at byte ``offset`` of the file."""
        start = offset - self.offset
        return self.text[start : self.text.index(b"\n", start)].decode()


def read_pieces(
    file: JournalFile, offset: int = 0, *, check: Check = check_owned, length: int = PIECE_BYTES
) -> Iterator[Piece]:
    """A file's content from byte ``offset`` up to the size it was listed with; nothing if it has been deleted.

    Args:
        file: The file.
        offset: Where to begin, in bytes.
        check: Who may own the file or write to it.
        length: How much to read at once, in bytes; more for a longer line. Records take many times the memory of their
            lines.

    Raises:
        RunUnreadable: It cannot be read, or does not pass ``check``.
    """
    length = min(length, LINE_LIMIT)
    while text := read_bytes(file, offset, min(length, file.size - offset), check):
        if len(text) == length < LINE_LIMIT and b"\n" not in text:
            text = read_bytes(file, offset, min(LINE_LIMIT, file.size - offset), check)
        end = offset + text.rfind(b"\n") + 1
        if end == offset and len(text) == LINE_LIMIT:
            # slurmtrain writes no line that long: skip it rather than wait forever for its end.
            end += LINE_LIMIT
        yield Piece(file.name, text, offset, end)
        if end == offset or len(text) < length:
            return  # what was appended after the files were listed is left for the next call
        offset = end


def last_records(path: Path, length: int, *, check: Check = check_owned) -> list[Mapping[str, object]]:
    """What is in the last ``length`` bytes of lines at a ``path``; none if it fails the ``check``, or to be read."""
    with contextlib.suppress(OSError, UntrustedPath):
        handle = open_regular(path, check=check)
        try:
            start = max(0, os.fstat(handle).st_size - length)
            reading = read_lines(os.pread(handle, length, start), start, path.name)
        finally:
            os.close(handle)
        return [record for _, record in reading.records]
    return []


def last_points(metrics: Path, length: int, *, check: Check = check_owned) -> list[Point]:
    """The points among the :func:`last_records` of a ``metrics`` file, for the same ``length`` and ``check``."""
    return points_of(last_records(metrics, length, check=check))


def line_number(path: Path, offset: int) -> int | None:
    """The number, counted from 1, of the line that begins at byte ``offset`` of a file; None if it cannot be read."""
    count, position = 1, 0
    with contextlib.suppress(OSError, UntrustedPath), os.fdopen(open_regular(path), "rb") as file:
        while position < offset and (text := file.read(min(PIECE_BYTES, offset - position))):
            count += text.count(b"\n")
            position += len(text)
        return count
    return None


def read_bytes(file: JournalFile, offset: int, length: int, check: Check = check_owned) -> bytes:
    """Bytes of a file, as many as there are; none if it has been deleted.

    Args:
        file: The file.
        offset: Where to begin, in bytes.
        length: How many.
        check: Who may own the file or write to it.

    Raises:
        RunUnreadable: It cannot be read, or does not pass ``check``.
    """
    try:
        handle = open_regular(file.path, check=check)
        try:
            return os.pread(handle, max(0, length), offset)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return b""
    except PathError as error:
        raise RunUnreadable(str(error)) from error
    except OSError as error:
        raise RunUnreadable(f"{file.name} cannot be read: {describe_os_error(error)}") from error


def _lines_in(run: RunDir, folder: str, problems: list[str]) -> list[JournalFile]:
    """The journals and metrics files in a ``folder`` of a run; appends what cannot be read to ``problems``."""
    files = []
    for entry in _entries_in(run, folder, problems):
        if not entry.name.endswith(".jsonl"):
            continue
        name = f"{folder}/{entry.name}"
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name} cannot be looked at: {describe_os_error(error)}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{name} is {kind_of(status)}, not a regular file")
        # The registry stores names as text.
        elif not is_text(entry.name):
            problems.append(f"{name!a} has a name that is not UTF-8")
        else:
            files.append(JournalFile(name, entry.path, status.st_size))
    return files


def _entries_in(run: RunDir, folder: str, problems: list[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder of a run, sorted so that a rebuild reads files in the same order as earlier commands.

    Appends the reason to ``problems`` if it exists and cannot be listed.
    """
    try:
        with os.scandir(f"{run.path}/{folder}") as entries:
            return sorted(entries, key=attrgetter("name"))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder} cannot be listed: {describe_os_error(error)}")
        return []


# --- what is new in a metrics file, in columns ------------------------------------------------------------------------


class MetricLines(NamedTuple):
    """Lines of a metrics file, up to byte ``end``.

    ``newest``: the step and time of the last point, with the last value of each metric; None if there is no point.
    ``garbage``: lines that are not points, or only in part.
    """

    block: Block
    newest: Point | None
    garbage: Sequence[Garbage]
    end: int


def read_metric_lines(file: JournalFile, offset: int = 0, *, length: int = PIECE_BYTES) -> Iterator[MetricLines]:
    """A metrics file's lines from byte ``offset`` up to the size it was listed with; none if it has been deleted.

    Args:
        file: The file.
        offset: Where to begin, in bytes.
        length: How much to read at once, in bytes. Lines take many times the memory of their columns.

    Raises:
        RunUnreadable: It cannot be read.
    """
    for piece in read_pieces(file, offset, length=length):
        plain = read_plain_lines(piece.whole_lines)
        if plain is not None:
            yield MetricLines(*plain, (), piece.end)
            continue
        points, newest, garbage = [], None, list(piece.reading.garbage)
        metrics: dict[str, float] = {}
        for start, record in piece.reading.records:
            flaws: list[str] = []
            point = read_point(record, flaws)
            if point is not None:
                points.append(point)
                metrics.update(point.metrics)
                newest = point._replace(metrics=metrics)
            if flaws:
                line = piece.line(start).encode()
                garbage.append(garbage_of(piece.name, start, line, f"values that are unusable: {', '.join(flaws)}"))
        yield MetricLines(block_of(points), newest, garbage, piece.end)
