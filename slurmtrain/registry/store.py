"""Reading the registry. Only this package uses SQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from slurmtrain.errors import (
    ConnectionLost,
    PathError,
    RegistryDamaged,
    RegistryFailed,
    RegistryNewer,
    RegistryUnusable,
    RunUnreadable,
)
from slurmtrain.model.run.layout import METRICS
from slurmtrain.registry import queries, schema
from slurmtrain.registry.choice import index
from slurmtrain.registry.choice.index import IndexRow
from slurmtrain.registry.choice.listed import Listed, decode_cell, is_mirrored
from slurmtrain.registry.database import engine_in_memory, identity, open_engine, put_aside, reading
from slurmtrain.registry.foreign_values import NOT_OURS, damaged_value
from slurmtrain.system.journal_files import has_unread, journal_files

if TYPE_CHECKING:
    from slurmtrain.model.database_url import DatabaseUrl
    from slurmtrain.model.metrics.summary import MetricSummary
    from slurmtrain.model.preflight.node_ledger import LedgerEntry
    from slurmtrain.model.query.conditions import Condition
    from slurmtrain.model.query.measures import Measure
    from slurmtrain.model.run.events.base import AnyEvent, Event, P
    from slurmtrain.model.run.journal import Garbage
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.model.run.run import Run
    from slurmtrain.registry.interruptions import PartitionHistory
    from slurmtrain.registry.sent import Sent
    from slurmtrain.registry.spare import Spare
    from slurmtrain.registry.sqlite.file import FileIdentity
    from slurmtrain.registry.transaction import Transaction


T = TypeVar("T")


def _has_news(run: RunDir, offsets: Mapping[str, int]) -> bool:
    """Whether there is more to read in a run than up to these ``offsets``, or something that cannot be read."""
    try:
        return has_unread(journal_files(run), offsets)
    except RunUnreadable:
        return True


class Store:
    """The registry of one runs root, or a copy in memory that is read from the run directories if it fails."""

    def __init__(self, address: Path | DatabaseUrl, spare: Spare | None = None) -> None:
        """Open the registry.

        Args:
            address: Its file, or its database on a server.
            spare: Replaces it if it fails, now or later; without it, every method raises what is raised here.

        Raises:
            RegistryNewer: It was made by a newer version.
            RegistryUnusable: It is not a registry.
            PathError: It cannot be opened.
        """
        self.address = address
        self._spare = spare
        self._was_damaged = False
        self.in_memory = False
        """Whether the database has failed, so that nothing is stored."""
        self._engine: sa.Engine
        self._file: FileIdentity | None
        try:
            self._open()
        except (PathError, RegistryUnusable) as error:
            self._replace(error)

    @classmethod
    def in_memory_only(cls) -> Store:
        """A registry of this process alone, which holds nothing yet."""
        store = cls.__new__(cls)
        store.address, store._spare, store.in_memory = Path(":memory:"), None, True
        store._was_damaged, store._file = False, None
        store._engine = engine_in_memory()
        return store

    def close(self) -> None:
        """Close the database. What replaces it stays readable: a database in memory is lost with its connection."""
        if not self.in_memory:
            self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def index(self, run_ids: Collection[str] | None = None) -> dict[str, IndexRow]:
        """These runs, or all, by id, oldest first."""
        return self._read(lambda connection: index.index_rows(connection, run_ids))

    def ids(self) -> frozenset[str]:
        """The ids of all runs."""
        return self._read(index.all_ids)

    def unsettled(self) -> dict[str, IndexRow]:
        """The runs that have not settled, by id."""
        return self._read(index.unsettled)

    def ended_last(self, limit: int) -> dict[str, IndexRow]:
        """The settled runs that ended last, by id; at most ``limit``."""
        return self._read(lambda connection: index.ended_last(connection, limit))

    def named(self, names: Collection[str]) -> dict[str, IndexRow]:
        """The runs that have one of these ids, names or sweeps, or an id that begins so, and the newest of all."""
        return self._read(lambda connection: index.named(connection, names))

    def worth_listing(self, newest: int) -> list[str]:
        """The ids of the runs that have not ended and of the ``newest`` that are not archived, oldest first."""
        return self._read(lambda connection: index.worth_listing(connection, newest))

    def children(self, run_id: str) -> dict[str, list[dict[str, Any]]]:
        """The runs that come from a run, oldest first, with all that they come from."""
        texts = self._read(lambda connection: index.children(connection, run_id))
        return {child: decode_cell(text, "Sequence[Mapping[str, Any]]") for child, text in texts.items()}

    def behind(self) -> list[str]:
        """The ids of the runs that trackers may have only in part, oldest first."""
        return self._read(index.behind)

    def candidates(self, conditions: Sequence[Condition], *, archived: bool) -> list[str]:
        """The ids of the runs that may meet all conditions, oldest first.

        Args:
            conditions: The conditions.
            archived: Whether archived runs that have ended are among them.
        """
        from slurmtrain.registry.choice import narrowing

        return self._read(lambda connection: narrowing.candidates(connection, conditions, archived=archived))

    def best_candidates(self, measure: Measure, *, larger: bool, limit: int) -> tuple[list[str], int]:
        """The ids of the runs with the best values of a measure, and how many runs have none.

        Args:
            measure: A measure that a summary has.
            larger: Whether larger values are better.
            limit: How many runs, at most.
        """
        from slurmtrain.registry.choice.narrowing import best_candidates

        return self._read(lambda connection: best_candidates(connection, measure, larger=larger, limit=limit))

    def listed(self, run_ids: Collection[str] | None = None) -> dict[str, Listed]:
        """These runs, or all, by id, oldest first, with only their newest attempt and checkpoint."""
        rows = sorted(self._rows(schema.run, run_ids), key=lambda row: str(row["id"]))
        if self.in_memory:  # what was sent is only in the file
            return {row["id"]: Listed(row) for row in rows}
        sent: dict[str, list[Mapping[str, Any]]] = {}
        for row in self._rows(schema.sent, run_ids):
            sent.setdefault(row["run_id"], []).append(row)
        return {
            row["id"]: Listed(row, mirrored=is_mirrored(row, of_run), trackers=of_run)
            for row in rows
            for of_run in [sent.get(row["id"], ())]
        }

    def load(self, run_id: str) -> Run | None:
        """One run with all attempts and checkpoints."""
        return self.load_all([run_id]).get(run_id)

    def load_all(self, run_ids: Collection[str]) -> dict[str, Run]:
        """The known ones among these runs, with all attempts and checkpoints."""
        from slurmtrain.registry import rows

        def read(connection: sa.Connection) -> dict[str, Run]:
            runs = list(queries.rows(connection, schema.run, run_ids))
            attempts = queries.rows_by_run(connection, schema.attempt, run_ids)
            checkpoints = queries.rows_by_run(connection, schema.checkpoint, run_ids)
            seconds = queries.spent_seconds(connection, run_ids)
            return {row["id"]: rows.run_of(row, attempts[row["id"]], checkpoints[row["id"]], seconds) for row in runs}

        return self._read(read)

    def events(self, run_id: str, cls: type[P]) -> list[Event[P]]:
        """A run's events of one kind, in no order. ``cls``: the payload class of that kind."""
        return self.events_of([run_id], cls).get(run_id, [])

    def events_of(self, run_ids: Collection[str], cls: type[P]) -> dict[str, list[Event[P]]]:
        """The events of one kind by run, in no order; runs without any are left out.

        Args:
            run_ids: The runs.
            cls: The payload class of that kind.
        """
        from slurmtrain.model.run.events.base import select
        from slurmtrain.registry.fact_rows import event_of

        def read(connection: sa.Connection) -> dict[str, list[AnyEvent]]:
            events: dict[str, list[AnyEvent]] = {}
            for row in queries.rows(connection, schema.event, run_ids, schema.event.c.kind == cls.KIND):
                if (event := event_of(row)) is not None:
                    events.setdefault(row["run_id"], []).append(event)
            return events

        return {run_id: select(events, cls) for run_id, events in self._read(read).items()}

    def surviving_metrics(
        self, run_ids: Collection[str] | None = None, names: Collection[str] | None = None
    ) -> dict[str, dict[str, MetricSummary]]:
        """What survives of metrics after rollbacks, by run and name: their newest, smallest and largest values.

        Args:
            run_ids: The runs; None for all.
            names: The metrics; None for all.
        """
        from slurmtrain.registry.line_rows import read_metrics

        return self._read(lambda connection: read_metrics(connection, run_ids, names))

    def ledger(self) -> list[LedgerEntry]:
        """All findings against nodes that failed a preflight, oldest first."""
        from slurmtrain.registry.fact_rows import LEDGER

        def read(connection: sa.Connection) -> list[LedgerEntry]:
            rows = list(queries.rows(connection, schema.ledger))
            rows.sort(key=lambda row: (row["seen_at"], row["host"], row["run_id"]))
            return [LEDGER.read(row) for row in rows]

        return self._read(read)

    def partition_history(
        self, run_id: str, name: str, executor: str, partition: str, since: float
    ) -> PartitionHistory:
        """What is known about interruptions in a run's partition, and about the cost of its saves.

        Args:
            run_id: The run.
            name: Its name: saves of other runs with this name are used as long as it has none.
            executor: ``slurm`` or ``local``.
            partition: The partition, as ``submitting`` events name it; empty for local runs.
            since: Attempts that began before this time, in seconds since 1970, do not count.
        """
        from slurmtrain.registry.interruptions import partition_history

        return self._read(lambda connection: partition_history(connection, run_id, name, executor, partition, since))

    def garbage(self, run_id: str) -> list[Garbage]:
        """Lines of a run's journals that are not records, ordered by journal and offset."""
        from slurmtrain.registry.fact_rows import GARBAGE

        def read(connection: sa.Connection) -> list[Garbage]:
            rows = list(queries.rows(connection, schema.garbage, [run_id]))
            rows.sort(key=lambda row: (row["source"], row["offset"]))
            return [GARBAGE.read(row) for row in rows]

        return self._read(read)

    def offsets(self, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """How far each file of these runs has been read, in bytes: by run, then by the file's name."""
        return self._read(lambda connection: queries.offsets(connection, run_ids))

    def unread(self, directories: Sequence[RunDir]) -> list[RunDir]:
        """The ``directories`` whose files contain bytes that have not been read, or cannot. Takes no write lock."""
        if not directories:
            return []
        offsets = self.offsets([directory.id for directory in directories])
        return [run for run in directories if _has_news(run, offsets.get(run.id, {}))]

    def sent(self, run_ids: Collection[str] | None = None) -> dict[str, dict[str, Sent]]:
        """What trackers have of these runs, or of all: by run id, then by the tracker's name."""
        from slurmtrain.registry.sent import SENT

        def read(connection: sa.Connection) -> dict[str, dict[str, Sent]]:
            by_run: dict[str, dict[str, Sent]] = {}
            for row in queries.rows(connection, schema.sent, run_ids):
                by_run.setdefault(row["run_id"], {})[row["tracker"]] = SENT.read(row)
            return by_run

        return self._read(read)

    def unsent(self, run_ids: Collection[str]) -> list[str]:
        """The ids of the runs with metrics that were read but not sent to every tracker."""
        read, sent = self.offsets(run_ids), self.sent(run_ids)

        def is_behind(run_id: str, path: str, offset: int) -> bool:
            return any(offset > each.offsets.get(path, 0) for each in sent[run_id].values()) if run_id in sent else True

        return [
            run_id
            for run_id in run_ids
            if any(
                path.endswith(f"/{METRICS}") and offset and is_behind(run_id, path, offset)
                for path, offset in read.get(run_id, {}).items()
            )
        ]

    def give_up(self, error: RegistryFailed) -> None:
        """Go on in memory, because the file would fail soon. Raises ``error`` if nothing replaces it."""
        if not self.in_memory:
            self._replace(error)

    def check(self) -> None:
        """Raise RegistryDamaged if SQLite finds anything wrong with the file."""
        if isinstance(self.address, Path):
            with reading(self._engine) as connection:
                finding = str(connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
            if finding != "ok":
                raise RegistryDamaged(f"the registry {self.address} is damaged ({finding})")

    def begin(self) -> Transaction:
        """A transaction, all or nothing; use it as ``with store.begin() as transaction:``. Nothing replaces it."""
        from slurmtrain.registry.transaction import Transaction

        return Transaction(self._engine)

    def write(self, change: Callable[[Transaction], T]) -> T:
        """Make a change in a transaction; again from the start, in memory, if the file fails.

        Args:
            change: What to do; it reads nothing but the transaction.
        """

        def transact() -> T:
            with self.begin() as transaction:
                return change(transaction)

        return self._try(transact)

    def _rows(
        self, table: sa.Table, run_ids: Collection[str] | None, *where: sa.ColumnElement[bool]
    ) -> list[dict[str, Any]]:
        return self._read(lambda connection: list(queries.rows(connection, table, run_ids, *where)))

    def _read(self, query: Callable[[sa.Connection], T]) -> T:
        def ask() -> T:
            with reading(self._engine) as connection:
                return query(connection)

        return self._try(ask)

    def _try(self, action: Callable[[], T]) -> T:
        """Do something with the database; again in memory, if it fails or holds what slurmtrain has not written."""
        try:
            try:
                return action()
            except ConnectionLost:
                # With a new connection: the server may only have been restarted, or the file replaced.
                if isinstance(self.address, Path):
                    self._reopen()
                return action()
        except (RegistryFailed, RegistryUnusable) as error:
            self._replace(error)
        except NOT_OURS as error:
            # In memory nothing is damaged: there it is a bug.
            if self.in_memory or self._spare is None:
                raise
            self._try_in_memory(action, self._spare)
            self._replace(damaged_value(error, self.address))
        return self._try(action)

    def _try_in_memory(self, action: Callable[[], object], spare: Spare) -> None:
        """Raise what the action raises with what the run directories hold: then no file is to blame."""
        engine, self._engine = self._engine, engine_in_memory()
        try:
            with self.begin() as transaction:
                spare.fill(transaction)
            action()
        finally:
            self._engine = engine

    def _reopen(self) -> None:
        self._engine.dispose()
        self._open()

    def _open(self) -> None:
        # Before it is opened: only this file may be put aside if it is damaged.
        self._file = identity(self.address)
        self._engine = open_engine(self.address)

    def _replace(self, error: PathError | RegistryUnusable) -> None:
        """Go on with a new file where one is damaged, or in memory with the run directories; or raise ``error``."""
        if self._spare is None or self.in_memory or isinstance(error, RegistryNewer):
            raise error
        problem = ""
        try:
            if isinstance(error, RegistryDamaged) and self._start_anew(error, self._spare):
                return
        except (PathError, RegistryUnusable) as failure:
            problem = f"; a new one cannot be made: {failure}"
        self._spare.warn(f"{error}{problem}; meanwhile the run directories are read instead")
        self.in_memory = True
        self._engine = engine_in_memory()
        with self.begin() as transaction:
            self._spare.fill(transaction)

    def _start_anew(self, error: RegistryDamaged, spare: Spare) -> bool:
        """Put a damaged file aside, once, and fill a new one; whether there is one now.

        A kill leaves the damaged file, none or a new one; the next command reads whatever that does not have.
        """
        if self._was_damaged or spare.note is None or not isinstance(self.address, Path):
            return False
        self._was_damaged = True
        if "_engine" in vars(self):
            self._engine.dispose()
        kept = put_aside(self.address, "damaged", only=self._file)
        if kept is not None:
            spare.note(
                f"the registry {self.address} was damaged ({error.__cause__ or error}): it is kept as {kept}, and a "
                "new one is made from the run directories"
            )
        self._open()
        # Also if another command has put the file aside: it may not have filled the new one yet.
        with self.begin() as transaction:
            spare.fill(transaction)
        return True
