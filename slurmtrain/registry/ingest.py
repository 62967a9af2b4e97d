"""Reading run directories into the registry: from stored byte offsets, idempotent, whatever died half-way."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmtrain.model.interruption.next_start import with_next_start
from slurmtrain.model.preflight.node_ledger import ledger_entries
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import fold
from slurmtrain.model.run.journal import Garbage, events_of, read_lines
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import Run
from slurmtrain.registry.scan import JournalFile, folder_times, is_quiet, journal_files
from slurmtrain.registry.transaction import Transaction

# Read at most this much of a file at once.
_CHUNK = 16 * 2**20
# Of a line that is longer than that, keep this much.
_KEPT = 1024
# So many runs are read before their rows are written: enough for a statement's cost not to matter, and few enough for
# their events to fit into memory.
_RUNS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Ingested:
    """A run as it is now known, and the lines that could not be read this time."""

    run: Run
    garbage: tuple[Garbage, ...]


def ingest(transaction: Transaction, runs: Sequence[RunDir], *, dead: bool) -> list[Ingested]:
    """Read what is new of these runs, and fold each again.

    Args:
        transaction: Where it goes.
        runs: The directories, each once.
        dead: Whether none of their processes can write any more.
    """
    ingested: list[Ingested] = []
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        readers = _readers(transaction, runs[first : first + _RUNS_AT_ONCE])
        ingested += [reader.ingest(transaction, dead=dead) for reader in readers]
        transaction.flush()
    return ingested


def _readers(transaction: Transaction, runs: Sequence[RunDir]) -> list[_RunReader]:
    """A reader for each run, with all that is known of it."""
    ids = [run.id for run in runs]
    offsets = transaction.offsets(ids)
    readers = [_RunReader(run, offsets.get(run.id, {})) for run in runs]
    for reader in readers:
        reader.forget_shrunk(transaction)
    # Of a run that is seen for the first time there is nothing to ask.
    read_before = [reader.run.id for reader in readers if reader.offsets]
    if read_before:
        events, progress = transaction.events(read_before), transaction.progress(read_before)
        for reader in readers:
            reader.events = events.get(reader.run.id, [])
            reader.progress = {**progress.get(reader.run.id, {}), **reader.progress}
    return readers


@dataclass(slots=True)
class _RunReader:
    """One run while it is read: its files, how far each was read before (bytes), and what they have said by now."""

    run: RunDir
    offsets: dict[str, int]
    events: list[AnyEvent] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)
    garbage: list[Garbage] = field(default_factory=list)
    looked_at_ns: int = 0
    scanned: tuple[int, ...] = ()
    files: Sequence[JournalFile] = ()

    def __post_init__(self) -> None:
        # The folders' times before their content: what appears in between is noticed the next time.
        self.looked_at_ns = time.time_ns()
        self.scanned = folder_times(self.run.path)
        self.files = journal_files(self.run)

    def forget_shrunk(self, transaction: Transaction) -> None:
        """Begin again with files that are shorter than they were: somebody has replaced them."""
        for file in self.files:
            if file.size < self.offsets.get(file.name, 0):
                transaction.forget(self.run.id, file.name)
                self.offsets[file.name] = 0
                if file.metrics_of is not None:
                    self.progress[file.metrics_of] = Progress()
                    transaction.set_progress(self.run.id, file.metrics_of, Progress())

    def ingest(self, transaction: Transaction, *, dead: bool) -> Ingested:
        for file in self.files:
            if file.size != self.offsets.get(file.name, 0):
                self._read(transaction, file)
        folded = with_next_start(fold(self.run.id, self.events, self.progress))
        numbers = {attempt.key: attempt.number for attempt in folded.attempts}
        transaction.put(
            folded,
            ledger_entries(self.run.id, self.events, numbers),
            settled=folded.ended and dead and is_quiet(self.scanned, self.looked_at_ns),
            scanned=self.scanned,
            revision=sum(self.offsets.values()),
        )
        return Ingested(folded, tuple(self.garbage))

    def _read(self, transaction: Transaction, file: JournalFile) -> None:
        """Read what is new of a file, a large piece at a time."""
        offset = self.offsets.get(file.name, 0)
        while chunk := _piece(file.path, offset, min(_CHUNK, file.size - offset)):
            end = self._take_in(transaction, file, offset, chunk)
            transaction.set_offset(self.run.id, file.name, end)
            self.offsets[file.name] = end
            if len(chunk) < _CHUNK:
                break  # what was appended since the files were listed is for the next time
            offset = end

    def _take_in(self, transaction: Transaction, file: JournalFile, offset: int, chunk: bytes) -> int:
        """Keep what a piece of a file says; returns the offset after its last whole line."""
        reading = read_lines(chunk, offset, file.name)
        garbage, end = list(reading.garbage), reading.end
        if file.metrics_of is not None:
            before = self.progress.get(file.metrics_of, Progress())
            self.progress[file.metrics_of] = before.advance(record for _, record in reading.records)
            transaction.set_progress(self.run.id, file.metrics_of, self.progress[file.metrics_of])
        else:
            events, garbage = events_of(reading, file.name)
            self.events += events
            for event in events:
                transaction.add_event(self.run.id, event, _line_at(chunk, event.offset - offset))
        if end == offset and len(chunk) == _CHUNK:
            # No line of ours is that long: pass over it rather than wait for its end for ever.
            garbage.append(Garbage(file.name, offset, chunk[:_KEPT]))
            end += len(chunk)
        if garbage:
            transaction.add_garbage(self.run.id, garbage)
            self.garbage += garbage
        return end


def _piece(path: str, offset: int, length: int) -> bytes:
    """So many bytes of a file, or fewer; none where it cannot be read."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(handle, length, offset)
        finally:
            os.close(handle)
    return b""


def _line_at(chunk: bytes, start: int) -> str:
    """The line that begins there. It is kept as it is: writing its JSON anew would take as long as reading it."""
    return chunk[start : chunk.index(b"\n", start)].decode()
