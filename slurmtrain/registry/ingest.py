"""Reading run directories into the registry: from stored byte offsets, and idempotent, whatever was interrupted."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.errors import RunUnreadable
from slurmtrain.model.interruption.policy import with_next_start
from slurmtrain.model.metrics.columns import Block
from slurmtrain.model.metrics.curves import AttemptLines, LineSummary, extend, start_of
from slurmtrain.model.preflight.node_ledger import ledger_entries
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal_lines import Garbage, Progress, events_of
from slurmtrain.model.run.layout import GUESSED_METRICS, JOURNALS, RunDir, attempt_of
from slurmtrain.model.run.run import Run, replace
from slurmtrain.registry import queries
from slurmtrain.registry.cells import read_sent
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system.journal_files import (
    JournalFile,
    folder_times,
    is_quiet,
    journal_files,
    read_metric_lines,
    read_pieces,
)

# This many runs are read before their rows are written: enough to make the cost of a statement negligible, and few
# enough for their events to fit into memory.
_RUNS_AT_ONCE = 250
# Lines of metrics take many times the memory of their columns.
_PIECE_BYTES = 1 << 20
# What content that nobody expected can lead to. A registry that cannot be used is no fault of a run's.
_UNEXPECTED = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip

ShowRuns = Callable[[int, int], None]
"""A callback that takes the number of runs read and the total."""


@dataclass(slots=True)
class Ingested:
    """What was read, by run: the runs as they are now known, garbage, and why others could not be read."""

    runs: dict[str, Run] = field(default_factory=dict)
    garbage: list[tuple[str, Garbage]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


def ingest(transaction: Transaction, runs: Sequence[RunDir], *, dead: bool) -> Ingested:
    """Read what is new in these runs, and rebuild each. One that cannot be read affects no other.

    Args:
        transaction: The transaction that stores the results.
        runs: The run directories, without duplicates.
        dead: Whether none of their processes can write any more.
    """
    ingested = Ingested()
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        # Records have no cycles, and looking for garbage in cycles takes a fifth of the time of reading them.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            batch = _read_runs(transaction, runs[first : first + _RUNS_AT_ONCE], ingested)
            try:
                with transaction.savepoint(*_UNEXPECTED):
                    _store_runs(transaction, batch, dead=dead, ingested=ingested)
            except _UNEXPECTED:
                # One after the other, to learn which ones cannot be stored. None of them should fail: the types of
                # events only allow values that can be stored.
                for reader in batch:
                    with _isolated(reader.run.id, ingested), transaction.savepoint(*_UNEXPECTED):
                        _store_runs(transaction, [reader], dead=dead, ingested=ingested)
        finally:
            if was_enabled:
                gc.enable()
    for run_id, reason in ingested.unreadable.items():
        transaction.set_unreadable(run_id, reason)
    return ingested


def ingest_all(
    transaction: Transaction, runs: Sequence[RunDir], show: ShowRuns = lambda _done, _total: None
) -> list[tuple[str, Garbage]]:
    """Read very many runs; returns lines that are no records, with the ids of their runs.

    Args:
        transaction: The transaction that stores what is read.
        runs: The run directories, without duplicates.
        show: Called with the progress.
    """
    garbage: list[tuple[str, Garbage]] = []
    show(0, len(runs))
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        garbage += ingest(transaction, runs[first : first + _RUNS_AT_ONCE], dead=False).garbage
        show(min(first + _RUNS_AT_ONCE, len(runs)), len(runs))
    return garbage


def _read_runs(transaction: Transaction, runs: Sequence[RunDir], ingested: Ingested) -> list[_RunReader]:
    """A reader for each of these runs that has read what is new in it; notes why the others cannot be read."""
    offsets = transaction.ask(lambda db: queries.offsets(db, [run.id for run in runs]))
    readers = []
    for run in runs:
        with _isolated(run.id, ingested):
            readers.append(_RunReader(run, offsets.get(run.id, {})))
    for reader in readers:
        reader.forget_shrunk(transaction)
    # The registry has nothing on a run that is seen for the first time.
    read_before = {reader.run.id: reader for reader in readers if reader.offsets}
    if read_before:
        progress = transaction.ask(lambda db: queries.progress_of(db, read_before))
        lines = transaction.ask(lambda db: queries.lines(db, read_before))
        facts = transaction.ask(lambda db: queries.builder_facts(db, read_before))
        ended = read_before.keys() - facts.keys()
        events = transaction.ask(lambda db: queries.events(db, ended)) if ended else {}
        for run_id, reader in read_before.items():
            reader.progress = {**progress.get(run_id, {}), **reader.progress}
            reader.line_before = lines.get(run_id, reader.line_before)
            reader.facts = facts.get(run_id)
            reader.earlier = events.get(run_id, ())
    completed = []
    for reader in readers:
        with _isolated(reader.run.id, ingested):
            reader.read(transaction)
            completed.append(reader)
    return completed


def _store_runs(transaction: Transaction, readers: Sequence[_RunReader], *, dead: bool, ingested: Ingested) -> None:
    """Write what the readers have read."""
    runs = {reader.run.id: reader.store(transaction, dead=dead) for reader in readers}
    transaction.flush()
    ingested.runs.update(runs)
    ingested.garbage += [(reader.run.id, garbage) for reader in readers for garbage in reader.garbage]


@contextlib.contextmanager
def _isolated(run_id: str, ingested: Ingested) -> Iterator[None]:
    """Whatever is wrong with the files of this run is the reason why it cannot be read, and nothing else."""
    try:
        yield
    except RunUnreadable as error:
        ingested.unreadable[run_id] = str(error)
    except _UNEXPECTED as error:
        ingested.unreadable[run_id] = f"unexpected content of its journals ({type(error).__name__}: {error})"


@dataclass(slots=True)
class _RunReader:
    """One run while it is being read: its files, how far each has been read (bytes), and the contents so far.

    ``facts``: the facts that it was last built from; None: it is built from its ``earlier`` events.
    """

    run: RunDir
    offsets: dict[str, int]
    facts: Mapping[str, Any] | None = None
    earlier: Sequence[AnyEvent] = ()
    builder: RunBuilder = field(init=False)
    new_events: list[AnyEvent] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    line_before: LineSummary = field(default_factory=LineSummary)
    line: LineSummary = field(default_factory=LineSummary)
    garbage: list[Garbage] = field(default_factory=list)
    looked_at_ns: int = 0
    scanned: tuple[int, ...] = ()
    files: Sequence[JournalFile] = ()
    changed: set[str] = field(default_factory=set)
    result: Run | None = None
    is_new: bool = False

    def __post_init__(self) -> None:
        self.is_new = not self.offsets
        # The folders' times are read before their content: what appears in between is noticed the next time.
        self.looked_at_ns = time.time_ns()
        self.scanned = folder_times(self.run.path)
        self.files = journal_files(self.run)

    def forget_shrunk(self, transaction: Transaction) -> None:
        """Start over with files that are shorter than before, since they have been replaced."""
        # A script that begins to report its metrics replaces what was guessed.
        names = {file.name for file in self.files}
        for name in [each for each in self.offsets if each.endswith(f"/{GUESSED_METRICS}") and each not in names]:
            transaction.forget(self.run.id, name)
            del self.offsets[name]
            if (key := attempt_of(name)) in self.progress:
                self.progress[key] = Progress()
                transaction.set_progress(self.run.id, key, Progress())
        for file in self.files:
            if file.size < self.offsets.get(file.name, 0):
                transaction.forget(self.run.id, file.name)
                self.offsets[file.name] = 0
                if file.metrics_of is not None:
                    self.progress[file.metrics_of] = Progress()
                    transaction.set_progress(self.run.id, file.metrics_of, Progress())

    def read(self, transaction: Transaction) -> None:
        """Read what is new, and build the run. Raises RunUnreadable if a file cannot be read."""
        begins = dict(self.offsets)
        for file in self.files:
            # A file whose size is known has nothing new: journals and metrics only grow.
            if file.size != self.offsets.get(file.name, 0):
                self._read_file(file)

        def all_events() -> list[AnyEvent]:
            # Earlier events are in the registry; the events read now are written only at the end.
            return [
                *transaction.ask(lambda db: queries.events(db, [self.run.id])).get(self.run.id, ()),
                *self.new_events,
            ]

        if self.facts is not None:
            self.builder = RunBuilder.from_dict(self.run.id, self.facts, all_events)
        else:
            self.builder = RunBuilder(self.run.id)
            self.builder.add(self.earlier)
        self.builder.add(self.new_events)
        # Without it, a run that trains would look like one that nobody has submitted.
        if not any(event.source.startswith(f"{JOURNALS}/") for event in self.builder.events):
            raise RunUnreadable(
                f"there is no event in {JOURNALS}/, although the command that made the run wrote some there"
            )
        result = with_next_start(self.builder.build(self.progress))
        read = [file._replace(size=self.offsets.get(file.name, 0)) for file in self.files]
        self.line = _summarise_line(self.line_before, result, read, begins, self.blocks)
        self.blocks.clear()
        surviving = ((name, self.line.metrics.get(name)) for name in result.metrics)
        newest = {name: math.nan if each.last is None else each.last for name, each in surviving if each is not None}
        self.result = replace(result, metrics=newest)

    def store(self, transaction: Transaction, *, dead: bool) -> Run:
        """Write what was read; returns the run."""
        assert self.result is not None
        run = self.result
        for event, line in zip(self.new_events, self.lines, strict=True):
            transaction.add_event(run.id, event, line)
        for name in self.changed:
            transaction.set_offset(run.id, name, self.offsets[name])
        for key in {file.metrics_of for file in self.files if file.name in self.changed} - {None}:
            transaction.set_progress(run.id, str(key), self.progress[str(key)])
        if self.line != self.line_before:
            transaction.set_line(run.id, self.line, self.line_before)
        transaction.add_garbage(run.id, self.garbage)
        numbers = {attempt.key: attempt.number for attempt in run.attempts}
        settled = run.ended and dead and is_quiet(self.scanned, self.looked_at_ns)
        findings = ledger_entries(run.id, self.builder.events, numbers)
        transaction.put(run, findings, settled=settled, scanned=self.scanned, revision=sum(self.offsets.values()))
        for sent in read_sent(self.run) if self.is_new else ():
            transaction.set_sent(run.id, sent)
        # A run that has ended is seldom read again: its events are in the registry anyway.
        if not run.ended:
            transaction.set_builder_facts(run.id, self.builder.to_dict())
        return run

    def _read_file(self, file: JournalFile) -> None:
        """Read what is new in a file."""
        begin = self.offsets.get(file.name, 0)
        if file.metrics_of is None:
            for piece in read_pieces(file, begin):
                events, garbage = events_of(piece.reading, piece.name)
                self.new_events += events
                # The unmodified lines: serializing their JSON again would take as long as parsing it.
                self.lines += [piece.line(event.offset) for event in events]
                self.garbage += garbage
                self._note_end(file, piece.end)
        else:
            for lines in read_metric_lines(file, begin):
                self.garbage += lines.garbage
                self.blocks[file.metrics_of].append(lines.block)
                before = self.progress.get(file.metrics_of, Progress())
                self.progress[file.metrics_of] = before.advance(() if lines.newest is None else (lines.newest,))
                self._note_end(file, lines.end)

    def _note_end(self, file: JournalFile, end: int) -> None:
        self.offsets[file.name] = end
        self.changed.add(file.name)


def _summarise_line(
    before: LineSummary,
    run: Run,
    files: Sequence[JournalFile],
    begins: Mapping[str, int],
    blocks: Mapping[str, Sequence[Block]],
) -> LineSummary:
    """The summary of a run's surviving line after further lines.

    Args:
        before: The summary before them.
        run: The run, with its attempts.
        files: Its files; of each, the size is what has been read of it, in bytes.
        begins: Where the further lines of each began, in bytes, by its name.
        blocks: The further lines, by the name of the attempt's directory.

    Raises:
        RunUnreadable: A rollback has taken away what was summarised, and a file cannot be read again.
    """
    by_key = {file.metrics_of: file for file in files if file.metrics_of is not None}

    def lines(key: str) -> tuple[int, int, Sequence[Block]]:
        file = by_key.get(key)
        return (0, 0, ()) if file is None else (begins.get(file.name, 0), file.size, blocks.get(key, ()))

    starts = [(attempt.key, start_of(attempt)) for attempt in run.attempts]
    extended = extend(before, [AttemptLines(key, start, *lines(key)) for key, start in starts])
    if extended is None:
        all_blocks = {
            key: [metrics.block for metrics in read_metric_lines(file, length=_PIECE_BYTES)]
            for key, file in by_key.items()
            if key in dict(starts)
        }
        again = [AttemptLines(key, start, 0, lines(key)[1], all_blocks.get(key, ())) for key, start in starts]
        extended = extend(LineSummary(), again)
        assert extended is not None
    return extended
