"""Reading run directories in several processes, for a registry that knows nothing of them; one process writes.

The others have no database: what they read comes back as rows, which are as they would have written them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection, get_context, parent_process

from slurmtrain.model.run.journal import Garbage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.rows import Row
from slurmtrain.registry.transaction import Transaction

ShowRuns = Callable[[int, int], None]
"""A callback that takes the number of runs read and the total."""

# So many runs at a time are read by a process: some megabytes of rows.
_BATCH = 250
# Fewer runs are read sooner than processes start.
_FEW = 1000
_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class _Batch:
    """What was read of some runs: rows by the statement that writes them."""

    rows: Mapping[str, Sequence[Row]]
    garbage: Sequence[tuple[str, Garbage]]
    unreadable: Mapping[str, str]


class _RowCollector(Transaction):
    """Collects the rows of runs of which nothing is stored."""

    def __init__(self, dialect: str) -> None:
        super().__init__(None, dialect=dialect)

    def flush(self) -> None:
        """Nothing: rows are collected until the end."""

    @contextlib.contextmanager
    def savepoint(self, *errors: type[Exception]) -> Iterator[None]:
        """As that of a database, where all rows inside are new."""
        lengths = {statement: len(rows) for statement, rows in self._rows.items()}
        try:
            yield
        except errors:
            for statement, rows in self._rows.items():
                del rows[lengths.get(statement, 0) :]
            raise

    def offsets(self, run_ids: Collection[str]) -> dict[str, dict[str, int]]:  # noqa: ARG002
        """Nothing has been read."""
        return {}

    def set_unreadable(self, run_id: str, reason: str) -> None:
        """Nothing: the process that writes does it."""

    def collected(self) -> Mapping[str, Sequence[Row]]:
        """The rows, by the statement that writes them."""
        return self._rows


def ingest_all(
    transaction: Transaction, runs: Sequence[RunDir], show: ShowRuns = lambda _done, _total: None
) -> list[tuple[str, Garbage]]:
    """Read runs that a registry knows nothing of; returns lines that are no records, with the ids of their runs.

    Args:
        transaction: The transaction that stores what is read.
        runs: The run directories, without duplicates.
        show: Called with the progress.
    """
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    batches = [runs[first : first + _BATCH] for first in range(0, len(runs), _BATCH)]
    garbage: list[tuple[str, Garbage]] = []
    count = 0
    show(count, len(runs))
    read = partial(_read, dialect=transaction.dialect)
    for part, batch in zip(batches, _in_processes(read, batches, processes if len(runs) > _FEW else 1), strict=True):
        transaction.add_rows(batch.rows)
        for run_id, reason in batch.unreadable.items():
            transaction.set_unreadable(run_id, reason)
        garbage += batch.garbage
        count += len(part)
        show(count, len(runs))
    return garbage


def _in_processes(
    read: Callable[[Sequence[RunDir]], _Batch], batches: Sequence[Sequence[RunDir]], processes: int
) -> Iterator[_Batch]:
    """What is read of each batch, in order; few batches wait for whoever uses them."""
    if processes == 1:
        yield from map(read, batches)
        return
    # New processes, not forks: those would share the connections, locks and threads of this one.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_parent)
    with pool:
        rest = iter(batches)
        futures: deque[Future[_Batch]] = deque(pool.submit(read, batch) for batch in islice(rest, 2 * processes))
        try:
            while futures:
                batch = futures.popleft().result()
                futures.extend(pool.submit(read, following) for following in islice(rest, 1))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however it does: nobody would read its results."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _read(runs: Sequence[RunDir], *, dialect: str) -> _Batch:
    collector = _RowCollector(dialect)
    ingested = ingest(collector, runs, dead=False)
    return _Batch(dict(collector.collected()), ingested.garbage, ingested.unreadable)
