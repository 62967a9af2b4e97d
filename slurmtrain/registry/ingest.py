"""Reading run directories into the registry: from stored byte offsets, and idempotent, whatever was interrupted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.interruption.next_start import with_next_start
from slurmtrain.model.preflight.node_ledger import ledger_entries
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal import Garbage, events_of
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.progress import Progress, points_of
from slurmtrain.model.run.run import Run
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system.journal_files import JournalFile, Piece, folder_times, is_quiet, journal_files, read_pieces

# This many runs are read before their rows are written: enough to make the cost of a statement negligible, and few
# enough for their events to fit into memory.
_RUNS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Ingested:
    """A run as it is now known, and the unreadable lines found this time."""

    run: Run
    garbage: tuple[Garbage, ...]


def ingest(transaction: Transaction, runs: Sequence[RunDir], *, dead: bool) -> list[Ingested]:
    """Read what is new in these runs, and rebuild each.

    Args:
        transaction: The transaction that stores the results.
        runs: The run directories, without duplicates.
        dead: Whether none of their processes can write any more.
    """
    ingested: list[Ingested] = []
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        readers = _readers(transaction, runs[first : first + _RUNS_AT_ONCE])
        ingested += [reader.ingest(transaction, dead=dead) for reader in readers]
        transaction.flush()
    return ingested


def _readers(transaction: Transaction, runs: Sequence[RunDir]) -> list[_RunReader]:
    """A reader for each run, with everything the registry knows about it."""
    ids = [run.id for run in runs]
    offsets = transaction.offsets(ids)
    readers = [_RunReader(run, offsets.get(run.id, {})) for run in runs]
    for reader in readers:
        reader.forget_shrunk(transaction)
    # The registry has nothing on a run that is seen for the first time.
    read_before = {reader.run.id: reader for reader in readers if reader.offsets}
    if read_before:
        progress = transaction.progress(read_before)
        facts = transaction.builder_facts(read_before)
        ended = read_before.keys() - facts.keys()
        events = transaction.events(ended) if ended else {}
        for run_id, reader in read_before.items():
            reader.progress = {**progress.get(run_id, {}), **reader.progress}
            if run_id in facts:
                reader.restore(transaction, facts[run_id])
            else:
                reader.builder.add(events.get(run_id, ()))
    return readers


@dataclass(slots=True)
class _RunReader:
    """One run while it is being read: its files, how far each has been read (bytes), and what they contained so far."""

    run: RunDir
    offsets: dict[str, int]
    builder: RunBuilder = field(init=False)
    new_events: list[AnyEvent] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)
    garbage: list[Garbage] = field(default_factory=list)
    looked_at_ns: int = 0
    scanned: tuple[int, ...] = ()
    files: Sequence[JournalFile] = ()

    def __post_init__(self) -> None:
        self.builder = RunBuilder(self.run.id)
        # The folders' times are read before their content: what appears in between is noticed the next time.
        self.looked_at_ns = time.time_ns()
        self.scanned = folder_times(self.run.path)
        self.files = journal_files(self.run)

    def restore(self, transaction: Transaction, facts: Mapping[str, Any]) -> None:
        """Continue from the ``facts`` that the run was last built from."""

        def all_events() -> list[AnyEvent]:
            # Earlier events are in the registry; those read now are written only at the end.
            return [*transaction.events([self.run.id]).get(self.run.id, ()), *self.new_events]

        self.builder = RunBuilder.from_dict(self.run.id, facts, all_events)

    def forget_shrunk(self, transaction: Transaction) -> None:
        """Start over with files that are shorter than before, since they have been replaced."""
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
        self.builder.add(self.new_events)
        run = with_next_start(self.builder.build(self.progress))
        numbers = {attempt.key: attempt.number for attempt in run.attempts}
        settled = run.ended and dead and is_quiet(self.scanned, self.looked_at_ns)
        findings = ledger_entries(self.run.id, self.builder.events, numbers)
        transaction.put(run, findings, settled=settled, scanned=self.scanned, revision=sum(self.offsets.values()))
        if not run.ended:
            transaction.set_builder_facts(self.run.id, self.builder.to_dict())
        return Ingested(run, tuple(self.garbage))

    def _read(self, transaction: Transaction, file: JournalFile) -> None:
        """Read what is new in a file."""
        for piece in read_pieces(file, self.offsets.get(file.name, 0)):
            self._add_piece(transaction, file, piece)
            transaction.set_offset(self.run.id, file.name, piece.reading.end)
            self.offsets[file.name] = piece.reading.end

    def _add_piece(self, transaction: Transaction, file: JournalFile, piece: Piece) -> None:
        """Keep the records of a piece of a file."""
        garbage = list(piece.reading.garbage)
        if file.metrics_of is not None:
            before = self.progress.get(file.metrics_of, Progress())
            self.progress[file.metrics_of] = before.advance(points_of(record for _, record in piece.reading.records))
            transaction.set_progress(self.run.id, file.metrics_of, self.progress[file.metrics_of])
        else:
            events, garbage = events_of(piece.reading, file.name)
            self.new_events += events
            for event in events:
                # The unmodified line: serializing its JSON again would take as long as parsing it.
                transaction.add_event(self.run.id, event, piece.line(event.offset))
        if garbage:
            transaction.add_garbage(self.run.id, garbage)
            self.garbage += garbage
