"""Process: reads run directories for a registry that knows nothing of them, and returns their rows.

It has no database. Batches of runs come pickled on standard input; what was read of each goes pickled to standard
output. It ends when its input does, as when the process that started it has been killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.model.run.journal import Garbage
from slurmtrain.model.run.layout import RunDir
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.rows import Row
from slurmtrain.registry.transaction import Transaction


@dataclass(frozen=True, slots=True)
class ReadRuns:
    """What was read of some runs: rows by the statement that writes them, and what could not be read."""

    rows: Mapping[str, Sequence[Row]]
    garbage: Sequence[tuple[str, Garbage]]
    unreadable: Mapping[str, str]


class _RowCollector(Transaction):
    """Collects the rows of runs that are not stored yet."""

    def __init__(self, dialect: str) -> None:
        super().__init__(None, dialect=dialect)

    def flush(self) -> None:
        """Nothing: rows are collected until the end."""

    @contextlib.contextmanager
    def savepoint(self, *errors: type[Exception]) -> Iterator[None]:
        """Like a database's savepoint, where all rows inside are new."""
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


def read_runs(runs: Sequence[RunDir], *, dialect: str) -> ReadRuns:
    """Read runs that are not stored yet.

    Args:
        runs: The run directories, without duplicates.
        dialect: Dialect of the database that is to have the rows.
    """
    collector = _RowCollector(dialect)
    ingested = ingest(collector, runs, dead=False)
    return ReadRuns(dict(collector.collected()), ingested.garbage, ingested.unreadable)


def main() -> None:
    """Read what is asked for; the only argument is the database's dialect."""
    # Ctrl-C is for the command, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What anything else prints must not get between the results.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            runs = pickle.load(sys.stdin.buffer)  # noqa: S301 (of the process that has started this one)
            pickle.dump(read_runs(runs, dialect=sys.argv[1]), output, pickle.HIGHEST_PROTOCOL)
            output.flush()
    os._exit(0)  # what is left in the buffer of a broken pipe cannot be flushed
