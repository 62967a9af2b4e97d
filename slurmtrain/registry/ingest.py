"""Reading run directories into the registry: from stored byte offsets, idempotent, whatever died half-way."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.model.preflight.node_ledger import ledger_entries
from slurmtrain.model.run.fold import fold
from slurmtrain.model.run.journal import Garbage, events_of, read_lines
from slurmtrain.model.run.layout import RunDir, split_attempt
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Run
from slurmtrain.registry.store import Store, Writing

# A directory that changed this recently may change again without its time changing (timestamps are coarse).
_COARSE_NS = 2_000_000_000
# Read at most this much of a file at once.
_CHUNK = 16 * 2**20
# Of a line that is longer than that, keep this much.
_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Ingested:
    """A run as it is now known, and the lines that could not be read this time."""

    run: Run
    garbage: tuple[Garbage, ...]


def directory_times(run: RunDir) -> tuple[int, ...]:
    """Modification times (ns) of the directories in which new files appear; empty where the run is gone.

    Journals only grow while their writer lives, so for a run whose writers are all dead these tell of every change.
    """
    times = []
    for path in (run.journals, run.attempts):
        try:
            times.append(os.stat(path).st_mtime_ns)  # noqa: PTH116 (asked of every run at every look)
        except FileNotFoundError:
            times.append(0)
    return tuple(times) if any(times) or run.path.exists() else ()


def is_quiet(times: tuple[int, ...], now_ns: int) -> bool:
    """Whether these directories were last changed long enough ago for their times to tell of any change since."""
    return all(now_ns - at > _COARSE_NS for at in times)


def has_news(store: Store, run: RunDir) -> bool:
    """Whether there are bytes in the run's files that the registry has not read; costs no write lock."""
    offsets = store.offsets(run.path.name)
    return any(_size(path) != offsets.get(name, 0) for name, path in _sources(run))


def ingest(writing: Writing, run: RunDir, *, dead: bool) -> Ingested:
    """Take in what is new of one run and fold it again. ``dead``: none of its processes can write any more."""
    before = time.time_ns()
    times = directory_times(run)
    offsets = writing.offsets(run.id)
    garbage: list[Garbage] = []
    progress = writing.progress(run.id)
    for name, path in _sources(run):
        garbage += _take_in(writing, run, name, path, offsets.get(name, 0), progress)
    events = writing.events(run.id)
    folded = fold(run.id, events, progress)
    against = ledger_entries(run.id, events, {attempt.key: attempt.number for attempt in folded.attempts})
    writing.put(folded, against, settled=folded.ended and dead and is_quiet(times, before), scanned=times)
    return Ingested(folded, tuple(garbage))


def _take_in(
    writing: Writing, run: RunDir, name: str, path: Path, offset: int, progress: dict[str, Progress]
) -> list[Garbage]:
    key = name.split("/")[1] if name.endswith("/metrics.jsonl") else None
    if _size(path) < offset:
        writing.forget(run.id, name)
        offset = 0
        if key is not None:
            progress[key] = Progress()
    garbage: list[Garbage] = []
    while chunk := _read(path, offset):
        reading = read_lines(chunk, offset, name)
        if key is None:
            events, bad = events_of(reading, name)
            writing.add(run.id, events, bad)
        else:
            bad = list(reading.garbage)
            writing.add(run.id, (), bad)
            progress[key] = progress.get(key, Progress()).advance(record for _, record in reading.records)
            writing.set_progress(run.id, key, progress[key])
        end = reading.end
        if end == offset and len(chunk) == _CHUNK:
            # No line of ours is that long: pass over it rather than wait for its end for ever.
            bad.append(Garbage(name, offset, chunk[:_KEPT]))
            writing.add(run.id, (), bad[-1:])
            end += len(chunk)
        garbage += bad
        writing.set_offset(run.id, name, end)
        if end == offset:
            break
        offset = end
    return garbage


def _sources(run: RunDir) -> Iterator[tuple[str, Path]]:
    """Every journal and metrics file of a run, by its path relative to the run directory."""
    for entry in _scan(run.journals):
        if entry.name.endswith(".jsonl"):
            yield f"journal/{entry.name}", Path(entry.path)
    for folder in _scan(run.attempts):
        if split_attempt(folder.name) is not None:
            for entry in _scan(Path(folder.path)):
                if entry.name.endswith(".jsonl"):
                    yield f"attempts/{folder.name}/{entry.name}", Path(entry.path)


def _scan(path: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError):
        return sorted(os.scandir(path), key=lambda entry: entry.name)
    return []


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read(path: Path, offset: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        return file.read(_CHUNK)
    return b""
