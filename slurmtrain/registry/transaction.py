"""Transactions: what commands write into the registry, all or nothing.

Rows are collected and written table by table: one statement for each row of each run would take ten times as long, most
of it spent preparing statements.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal_lines import Garbage, Progress
from slurmtrain.model.run.run import UNREADABLE, LedgerEntry, Run
from slurmtrain.registry import queries, schema
from slurmtrain.registry.rows import (
    ATTEMPTS,
    CHECKPOINTS,
    GARBAGE,
    LEDGER,
    METRICS,
    PROGRESS,
    RUNS,
    SENT,
    Row,
    RowFormat,
    run_row,
)
from slurmtrain.registry.schema import Conflict, insert

if TYPE_CHECKING:
    from slurmtrain.model.metrics.curves import LineSummary
    from slurmtrain.registry.cells import Sent

T = TypeVar("T")

# Putting a run replaces all its rows in these tables: the old ones are deleted first.
_OF_A_RUN = (schema.attempt, schema.attempt_seconds, schema.builder, schema.checkpoint, schema.ledger)


class Transaction:
    """A transaction that holds the registry's write lock from its start.

    What its methods write can be read back after :meth:`flush`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        """``engine``: the database."""
        self._transaction = engine.begin()
        self.dialect = engine.dialect.name
        self._rows: dict[str, list[Row]] = defaultdict(list)
        self._put: set[str] = set()

    def __enter__(self) -> Transaction:
        self._connection = self._transaction.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            try:
                self.flush()
            except BaseException as failure:
                # Rolled back: with a part of its rows, a run would look different from its journals.
                self._transaction.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._transaction.__exit__(*error)

    def flush(self) -> None:
        """Write the rows collected so far."""
        if self._put:
            ids = {"ids": json.dumps(sorted(self._put))}
            # Attempts and checkpoints may have become fewer, as after a rebuild: they are not just replaced.
            for table in _OF_A_RUN:
                self._connection.execute(_deletion(table), ids)
            self._put.clear()
        for statement, rows in self._rows.items():
            if rows:
                self._connection.exec_driver_sql(statement, rows)
        self._rows.clear()

    @contextlib.contextmanager
    def savepoint(self, *errors: type[Exception]) -> Iterator[None]:
        """What is written inside is undone if one of these ``errors`` leaves it; others end the whole transaction."""
        # What was collected so far belongs outside: a rollback to the savepoint must not take it along.
        self.flush()
        self._connection.exec_driver_sql("SAVEPOINT part")
        try:
            yield
            self.flush()
        except errors:
            self._rows.clear()
            self._put.clear()
            self._connection.exec_driver_sql("ROLLBACK TO part")
            raise
        self._connection.exec_driver_sql("RELEASE part")

    def clear(self) -> None:
        """Delete everything that comes from run directories, but not the trackers' rows: old directories lack them."""
        for table in schema.metadata.tables.values():
            if table is not schema.sent:
                self._connection.execute(table.delete())

    def ask(self, query: Callable[[sa.Connection], T]) -> T:
        """What a ``query`` finds, such as one of :mod:`slurmtrain.registry.queries`; what is not flushed is missing."""
        return query(self._connection)

    def forget(self, run_id: str, source: str) -> None:
        """Delete what was read from a file that has shrunk, so that it is read again from its start."""
        # Without its facts, the run is built from its events, since the old facts include some that are deleted here.
        self._connection.execute(schema.builder.delete().where(schema.builder.c.run_id == run_id))
        for table in (schema.event, schema.garbage):
            self._connection.execute(table.delete().where(table.c.run_id == run_id, table.c.source == source))
        where = (schema.source.c.run_id == run_id, schema.source.c.path == source)
        self._connection.execute(schema.source.delete().where(*where))

    def add_event(self, run_id: str, event: AnyEvent, line: str) -> None:
        """Store an event of a run; one that is already known changes nothing.

        Args:
            run_id: The run.
            event: The event.
            line: Its line in the journal.
        """
        self._add("ignore", schema.event, [(run_id, event.source, event.offset, event.time, event.kind, line)])

    def add_garbage(self, run_id: str, garbage: Iterable[Garbage]) -> None:
        """Store lines of a run's journals that are not records; known ones change nothing."""
        self._add("ignore", GARBAGE, [GARBAGE.row(line, run_id) for line in garbage])

    def set_offset(self, run_id: str, source: str, offset: int) -> None:
        """Record how far a file has been read.

        Args:
            run_id: The run.
            source: The file, relative to the run directory.
            offset: In bytes.
        """
        self._add("replace", schema.source, [(run_id, source, offset)])

    def set_progress(self, run_id: str, attempt_key: str, progress: Progress) -> None:
        """Store the summary of an attempt's metrics.

        Args:
            run_id: The run.
            attempt_key: The name of the attempt's directory.
            progress: The summary.
        """
        self._add("replace", PROGRESS, [PROGRESS.row(progress, run_id, attempt_key)])

    def set_line(self, run_id: str, line: LineSummary, before: LineSummary) -> None:
        """Store what survives of a run's metrics.

        Args:
            run_id: The run.
            line: What survives now.
            before: What is stored.
        """
        # A rollback may have taken all points of a metric.
        if gone := before.metrics.keys() - line.metrics.keys():
            table = schema.metric
            self._connection.execute(table.delete().where(table.c.run_id == run_id, table.c.name.in_(sorted(gone))))
        changed = {name: each for name, each in line.metrics.items() if before.metrics.get(name) != each}
        self._add("replace", METRICS, [METRICS.row(each, run_id, name) for name, each in changed.items()])
        self._add("replace", schema.line, [(run_id, json.dumps(line.to_json()))])

    def set_builder_facts(self, run_id: str, facts: Mapping[str, Any]) -> None:
        """Store the facts from which a run that has not ended is built. Call :meth:`put` for the run first."""
        self._add("fail", schema.builder, [(run_id, json.dumps(facts))])

    def put(
        self, run: Run, entries: Sequence[LedgerEntry], *, settled: bool, scanned: Sequence[int], revision: int
    ) -> None:
        """Store a run, replacing what was known about it.

        Args:
            run: The run as its events describe it.
            entries: Its findings against nodes.
            settled: Whether it has ended and no process can still write to it.
            scanned: Times (ns) of its folders when its files were listed; empty if they are gone.
            revision: How many bytes of its journals and metrics have been read.
        """
        # The rows that are to be replaced must be written before they can be deleted.
        if run.id in self._put:
            self.flush()
        self._put.add(run.id)
        self._add("fail", ATTEMPTS, [ATTEMPTS.row(attempt, run.id) for attempt in run.attempts])
        spent = [(run.id, a.number, kind, seconds) for a in run.attempts for kind, seconds in a.spent.items()]
        self._add("fail", schema.attempt_seconds, spent)
        self._add("fail", CHECKPOINTS, [CHECKPOINTS.row(checkpoint, run.id) for checkpoint in run.checkpoints])
        self._add("fail", LEDGER, [LEDGER.row(entry) for entry in entries])
        self._add("replace", RUNS, [run_row(run, settled=settled, scanned=scanned, revision=revision)])

    def set_unreadable(self, run_id: str, reason: str) -> None:
        """Record that a run cannot be read, and why; everything else that is known about it stays.

        Nothing is written if that is recorded already.
        """
        self.flush()
        # A path in the reason may have bytes that are not UTF-8, which no database takes as text.
        storable = reason.encode(errors="backslashreplace").decode()
        run = Run(id=run_id, name=run_id, state=UNREADABLE, reason=storable, executor="")
        row = run_row(run, settled=False, scanned=(), revision=0)
        # Of a run that is known, only what concerns that is changed.
        changes = "state = excluded.state, reason = excluded.reason, settled = excluded.settled"
        differs = "run.state <> excluded.state OR run.reason <> excluded.reason OR run.settled <> excluded.settled"
        statement = insert(self.dialect, "fail", RUNS.table, RUNS.columns)
        self._connection.exec_driver_sql(f"{statement} ON CONFLICT (id) DO UPDATE SET {changes} WHERE {differs}", row)

    def settle(self, scanned: Mapping[str, Sequence[int]]) -> None:
        """Record that these runs are settled. ``scanned``: their folders' times (ns), by run."""
        self.flush()
        columns: dict[str, Any] = {"journals_at": sa.bindparam("journals"), "attempts_at": sa.bindparam("attempts")}
        update = schema.run.update().where(schema.run.c.id == sa.bindparam("run_id")).values(settled=True, **columns)
        rows = [{"run_id": run_id, "journals": at[0], "attempts": at[1]} for run_id, at in scanned.items()]
        if rows:
            self._connection.execute(update, rows)

    def set_cancelled(self, run_ids: Collection[str], at: float) -> None:
        """Record that runs were ended whose directories were deleted, so that no journal says it.

        Args:
            run_ids: The runs; unknown ones are passed over.
            at: When, in seconds since 1970.
        """
        self.flush()
        update = schema.run.update().where(queries.of_runs(schema.run))
        values = {"state": "cancelled", "cancelled": True, "settled": True, "ended_at": at}
        self._connection.execute(update.values(values), {"ids": json.dumps(list(run_ids))})

    def remove(self, run_ids: Collection[str]) -> None:
        """Delete everything about runs whose directories are gone; should one come back, it is read again.

        Args:
            run_ids: The runs; unknown ones are passed over.
        """
        self.flush()
        ids = {"ids": json.dumps(list(run_ids))}
        # Also what was sent to trackers: the directory has that too, should it come back.
        for table in schema.metadata.tables.values():
            self._connection.execute(_deletion(table), ids)

    def set_sent(self, run_id: str, sent: Sent) -> None:
        """Record how much of a run a tracker has."""
        self._add("replace", SENT, [SENT.row(sent, run_id)])

    def _add(self, conflict: Conflict, into: RowFormat[Any] | sa.Table, rows: Iterable[Row]) -> None:
        """Note rows for a table, to be written with all others of their kind; they have all of its columns."""
        table_columns = (into,) if isinstance(into, sa.Table) else (into.table, into.columns)
        self._rows[insert(self.dialect, conflict, *table_columns)] += rows


@cache
def _deletion(table: sa.Table) -> sa.Delete:
    return table.delete().where(queries.of_runs(table))
