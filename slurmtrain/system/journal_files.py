"""The journals and metrics files of a run directory: where they are, whether they have grown, and what is new in them.

Commands continue reading where they last stopped; agents read from the start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from slurmtrain.model.run.journal import Garbage, Reading, read_lines
from slurmtrain.model.run.layout import ATTEMPTS, JOURNALS, METRICS, RunDir, split_attempt

# A directory changed more recently than this may change again with the same timestamp, since timestamps are coarse.
_COARSE_NS = 2_000_000_000
# Read at most this much of a file at once.
_PIECE_BYTES = 16 * 2**20
# Keep this much of a line that is longer than that.
_KEPT_BYTES = 1024


class JournalFile(NamedTuple):
    """A journal or a metrics file. ``name`` is its path relative to the run directory, ``size`` is in bytes."""

    name: str
    path: str
    size: int

    @property
    def metrics_of(self) -> str | None:
        """The name of the directory of the attempt whose metrics these are; None for a journal."""
        return self.name.split("/")[1] if self.name.endswith(f"/{METRICS}") else None


def folder_times(run: Path | str) -> tuple[int, ...]:
    """Modification times (ns) of the folders in which new files appear; empty if the run directory is gone.

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


def is_quiet(times: Iterable[int], now_ns: int) -> bool:
    """Whether folders with these ``times`` changed long enough before ``now_ns`` for any later change to show."""
    return all(now_ns - at > _COARSE_NS for at in times)


def journal_files(run: RunDir) -> list[JournalFile]:
    """Every journal and metrics file of a run. Files and folders that cannot be read are skipped."""
    root = str(run.path)
    files = [_file(f"{JOURNALS}/{entry.name}", entry) for entry in _lines_in(f"{root}/{JOURNALS}")]
    for folder in _entries(f"{root}/{ATTEMPTS}"):
        if split_attempt(folder.name) is not None:
            files += [_file(f"{ATTEMPTS}/{folder.name}/{entry.name}", entry) for entry in _lines_in(folder.path)]
    return files


def has_unread(files: Iterable[JournalFile], offsets: Mapping[str, int]) -> bool:
    """Whether any of these ``files`` is longer or shorter than the part already read (``offsets``: bytes by name)."""
    return any(file.size != offsets.get(file.name, 0) for file in files)


class Piece(NamedTuple):
    """A piece of a file. ``text``: its bytes, starting at byte ``offset`` of the file; ``reading``: its whole lines."""

    text: bytes
    offset: int
    reading: Reading

    def line(self, offset: int) -> str:
        """The unmodified line that begins at byte ``offset`` of the file."""
        start = offset - self.offset
        return self.text[start : self.text.index(b"\n", start)].decode()


def read_pieces(file: JournalFile, offset: int = 0) -> Iterator[Piece]:
    """A file's content from byte ``offset`` up to the size it was listed with; nothing if it cannot be read."""
    while text := _read_bytes(file.path, offset, min(_PIECE_BYTES, file.size - offset)):
        reading = read_lines(text, offset, file.name)
        if reading.end == offset and len(text) == _PIECE_BYTES:
            # slurmtrain writes no line that long: skip it rather than wait forever for its end.
            garbage = Garbage(file.name, offset, text[:_KEPT_BYTES])
            reading = Reading((), (*reading.garbage, garbage), offset + len(text))
        yield Piece(text, offset, reading)
        if len(text) < _PIECE_BYTES:
            return  # what was appended after the files were listed is left for the next call
        offset = reading.end


def _read_bytes(path: str, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes of a file; none if it cannot be read."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(handle, max(0, length), offset)
        finally:
            os.close(handle)
    return b""


def _lines_in(folder: str) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if entry.name.endswith(".jsonl")]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted so that a rebuild reads files in the same order as earlier commands."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entries, key=attrgetter("name"))
    return []


def _file(name: str, entry: os.DirEntry[str]) -> JournalFile:
    try:
        return JournalFile(name, entry.path, entry.stat().st_size)
    except OSError:
        return JournalFile(name, entry.path, 0)
