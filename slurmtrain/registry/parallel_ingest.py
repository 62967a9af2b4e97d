"""Reading run directories in several processes, for a registry that knows nothing of them; one process writes.

The others have no database: they return the rows that they would have written.
"""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue

from slurmtrain.model.run.journal import Garbage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.registry.reader_process import ReadRuns, read_runs
from slurmtrain.registry.transaction import Transaction
from slurmtrain.system.interpreter import own_python

ShowRuns = Callable[[int, int], None]
"""A callback that takes the number of runs read and the total."""

# So many runs at a time are read by a process: some megabytes of rows.
_BATCH = 250
# Fewer runs are read sooner than processes start.
FEW = 1000
_MOST_PROCESSES = 8
# Not as its main module, by whose name this process would look for the classes of its results.
_PROCESS = "from slurmtrain.registry.reader_process import main; main()"


def ingest_all(
    transaction: Transaction,
    runs: Sequence[RunDir],
    show: ShowRuns = lambda _done, _total: None,
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
    read = _in_processes(batches, processes if len(runs) > FEW else 1, transaction.dialect)
    for part, batch in zip(batches, read, strict=True):
        transaction.add_rows(batch.rows)
        for run_id, reason in batch.unreadable.items():
            transaction.set_unreadable(run_id, reason)
        garbage += batch.garbage
        count += len(part)
        show(count, len(runs))
    return garbage


def _in_processes(batches: Sequence[Sequence[RunDir]], processes: int, dialect: str) -> Iterator[ReadRuns]:
    """What is read of each batch, in order; few batches wait for whoever uses them."""
    if processes == 1:
        for runs in batches:
            yield read_runs(runs, dialect=dialect)
        return
    free: SimpleQueue[_Reader] = SimpleQueue()

    def read(batch: Sequence[RunDir]) -> ReadRuns:
        reader = free.get()
        try:
            return reader.read(batch)
        finally:
            free.put(reader)

    # The readers are stopped before the pool waits for its threads, which wait for them.
    with ThreadPoolExecutor(processes) as pool, ExitStack() as readers:
        for _ in range(processes):
            free.put(reader := _Reader(dialect))
            readers.callback(reader.stop)
        rest = iter(batches)
        futures: deque[Future[ReadRuns]] = deque(pool.submit(read, batch) for batch in islice(rest, 2 * processes))
        readers.callback(lambda: [future.cancel() for future in futures])
        while futures:
            batch = futures.popleft().result()
            futures.extend(pool.submit(read, following) for following in islice(rest, 1))
            yield batch


class _Reader:
    """A process that reads runs. It is not multiprocessing's, which would import the main module of any program."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._is_stopped = False
        self._process = subprocess.Popen(
            own_python("-P", "-c", _PROCESS, dialect),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read(self, runs: Sequence[RunDir]) -> ReadRuns:
        """What is read of these runs; if the process has been killed, this one reads them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(pickle.dumps(runs))
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)  # type: ignore[no-any-return]  # noqa: S301 (of our own process)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            if self._is_stopped:
                raise
            return read_runs(runs, dialect=self._dialect)

    def stop(self) -> None:
        """End the process."""
        self._is_stopped = True
        self._process.kill()
        self._process.wait()
