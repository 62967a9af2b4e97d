"""Opening and reading the registry: a SQLite file, a schema on a PostgreSQL server, or one in memory.

Only this package uses SQL. One in memory replaces a registry that fails, or a new file one that is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
from slurmtrain.registry import queries, schema, sqlite
from slurmtrain.registry.cells import NOT_OURS, damaged_value
from slurmtrain.registry.rows import Listed, decode_cell, is_mirrored
from slurmtrain.system.interpreter import REGISTRIES, load_plugin
from slurmtrain.system.journal_files import has_unread, journal_files

if TYPE_CHECKING:
    from slurmtrain.model.metrics.columns import MetricSummary
    from slurmtrain.model.run.accounting import Interval
    from slurmtrain.model.run.events.base import Event
    from slurmtrain.model.run.events.base import P as E
    from slurmtrain.model.run.journal_lines import Garbage
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.model.run.run import Attempt, LedgerEntry, Run
    from slurmtrain.model.urls import DatabaseUrl
    from slurmtrain.registry.cells import Sent
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.sqlite import FileIdentity
    from slurmtrain.registry.transaction import Transaction


T = TypeVar("T")


def open_engine(address: Path | DatabaseUrl) -> sa.Engine:
    """Open the database of a registry, which is created if there is none.

    One of an earlier version is emptied: the next command reads all runs again.

    Args:
        address: Where it is.

    Raises:
        RegistryUnusable: It is not a registry.
        RegistryFailed: It cannot be used now: somebody else holds it for too long, its disk is full or its server down.
        PathError: It cannot be opened; UntrustedPath: It, or its directory, is somebody else's.
    """
    if isinstance(address, Path):
        return sqlite.open_file(address)
    engine: sa.Engine = _on_server().open_server(address)
    return engine


def _on_server() -> Any:
    """The plug-in for registries on a server. Raises RegistryFailed where psycopg is missing, which is an extra."""
    return load_plugin(REGISTRIES, "postgresql")


def reading(engine: sa.Engine) -> sa.Connection:
    """A connection that only reads, and so waits for no writer, except one of a SQLite file that is committing."""
    options: dict[str, Any] = sqlite.READS
    if engine.dialect.name == "postgresql":
        options = _on_server().READS
    return engine.connect().execution_options(**options)


def put_registry_aside(address: Path | DatabaseUrl, suffix: str, *, only: FileIdentity | None = None) -> Path | None:
    """Make room for a new registry where one cannot be used: a file is renamed, a schema emptied.

    Args:
        address: Where it is.
        suffix: What the new name ends in.
        only: The only file that is renamed; another one may be there by now.

    Returns:
        The file's new name, if it was renamed.

    Raises:
        RegistryUnusable: A schema holds tables of others; RegistryFailed, PathError.
    """
    if isinstance(address, Path):
        return sqlite.put_file_aside(address, suffix, only)
    _on_server().start_anew(address)
    return None


@dataclass(frozen=True, slots=True)
class Spare:
    """What a registry needs to be replaced if it fails.

    ``runs``: finds all run directories, to read them again. ``warn``: called with the reason, once. ``note``: called
    with what was done about a damaged file; None: nothing is.
    """

    runs: Callable[[], Sequence[RunDir]]
    warn: Callable[[str], None]
    note: Callable[[str], None] | None = None

    def fill(self, transaction: Transaction) -> None:
        """Read all run directories into a registry."""
        # Most commands need none of it.
        from slurmtrain.registry.ingest import ingest

        ingest(transaction, self.runs(), dead=False)


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

    def close(self) -> None:
        """Close the database. What replaces it stays readable: a database in memory is lost with its connection."""
        # A watch closes the registry before it reports its findings.
        if not self.in_memory:
            self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, query: Callable[[sa.Connection], T]) -> T:
        """What a ``query`` finds, such as one of :mod:`slurmtrain.registry.queries`."""

        def read() -> T:
            with reading(self._engine) as connection:
                return query(connection)

        return self._try(read)

    def index(self, run_ids: Collection[str] | None = None) -> dict[str, IndexRow]:
        """These runs, or all, by id, oldest first."""
        return self.ask(lambda db: queries.index_rows(db, run_ids))

    def ids(self) -> frozenset[str]:
        """The ids of all runs."""
        return self.ask(queries.all_ids)

    def children(self, run_id: str) -> dict[str, list[dict[str, Any]]]:
        """The runs that come from a run, oldest first, with all that they come from."""
        texts = self.ask(lambda db: queries.children(db, run_id))
        return {child: decode_cell(text, "Sequence[Mapping[str, Any]]") for child, text in texts.items()}

    def listed(self, run_ids: Collection[str] | None = None) -> dict[str, Listed]:
        """These runs, or all, by id, oldest first, with only their newest attempt and checkpoint."""

        def rows(connection: sa.Connection, table: sa.Table) -> list[dict[str, Any]]:
            return list(queries.rows(connection, table, run_ids))

        runs = sorted(self.ask(lambda db: rows(db, schema.run)), key=lambda row: str(row["id"]))
        if self.in_memory:  # what was sent is only in the file
            return {row["id"]: Listed(row) for row in runs}
        sent: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.ask(lambda db: rows(db, schema.sent)):
            sent.setdefault(row["run_id"], []).append(row)
        return {
            row["id"]: Listed(row, mirrored=is_mirrored(row, of_run), trackers=of_run)
            for row in runs
            for of_run in [sent.get(row["id"], ())]
        }

    def load(self, run_id: str) -> Run | None:
        """One run with all attempts and checkpoints."""
        return self.load_all([run_id]).get(run_id)

    def load_all(self, run_ids: Collection[str]) -> dict[str, Run]:
        """The known ones among these runs, with all attempts and checkpoints."""
        return self.ask(lambda db: queries.load_runs(db, run_ids))

    def charged_attempts(self, run_ids: Collection[str]) -> dict[str, list[Attempt]]:
        """The attempts of these runs, in order, with no more of each than its cost needs."""
        return self.ask(lambda db: queries.charged_attempts(db, run_ids))

    def completed_namesakes(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """The name and the executor of each of the newest completed runs with these ``names``, newest first."""
        return self.ask(lambda db: queries.completed_namesakes(db, names))

    def events(self, run_id: str, cls: type[E]) -> list[Event[E]]:
        """A run's events of one kind, in no order. ``cls``: the payload class of that kind."""
        return self.events_of([run_id], cls).get(run_id, [])

    def events_of(self, run_ids: Collection[str], cls: type[E]) -> dict[str, list[Event[E]]]:
        """The events of one kind by run, in no order; runs without any are left out.

        Args:
            run_ids: The runs.
            cls: The payload class of that kind.
        """
        from slurmtrain.model.run.events.base import select

        by_run = self.ask(lambda db: queries.events(db, run_ids, cls.KIND))
        return {run_id: select(events, cls) for run_id, events in by_run.items()}

    def timelines(self, run_id: str) -> dict[str, list[Interval]]:
        """When each attempt of a run spent its time on what, by the name of its directory."""
        from slurmtrain.model.run.fold import RunBuilder

        def read(connection: sa.Connection) -> dict[str, list[Interval]]:
            builder = RunBuilder(run_id)
            builder.add(queries.events(connection, [run_id]).get(run_id, ()))
            return builder.timelines(queries.progress_of(connection, [run_id]).get(run_id, {}))

        return self.ask(read)

    def surviving_metrics(
        self, run_ids: Collection[str] | None = None, names: Collection[str] | None = None
    ) -> dict[str, dict[str, MetricSummary]]:
        """What survives of metrics after rollbacks, by run and name: their newest, smallest and largest values.

        Args:
            run_ids: The runs; None for all.
            names: The metrics; None for all.
        """
        return self.ask(lambda db: queries.surviving_metrics(db, run_ids, names))

    def ledger(self) -> list[LedgerEntry]:
        """All findings against nodes that failed a preflight, oldest first."""
        return self.ask(queries.ledger)

    def garbage(self, run_id: str) -> list[Garbage]:
        """Lines of a run's journals that are not records, ordered by journal and offset."""
        return self.ask(lambda db: queries.garbage(db, run_id))

    def unread(self, directories: Sequence[RunDir]) -> list[RunDir]:
        """The ``directories`` whose files contain bytes that have not been read, or cannot. Takes no write lock."""
        if not directories:
            return []
        offsets = self.ask(lambda db: queries.offsets(db, [directory.id for directory in directories]))
        news = []
        for run in directories:
            try:
                has_news = has_unread(journal_files(run), offsets.get(run.id, {}))
            except RunUnreadable:
                has_news = True
            if has_news:
                news.append(run)
        return news

    def sent(self, run_ids: Collection[str] | None = None) -> dict[str, dict[str, Sent]]:
        """What trackers have of these runs, or of all: by run id, then by the tracker's name."""
        return self.ask(lambda db: queries.sent(db, run_ids))

    def unsent(self, run_ids: Collection[str]) -> list[str]:
        """The ids of the runs with metrics that were read but not sent to every tracker."""
        read, sent = self.ask(lambda db: queries.offsets(db, run_ids)), self.sent(run_ids)

        def is_behind(run_id: str, path: str, offset: int) -> bool:
            # A run without any row has not been sent to anybody.
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

    def _try(self, action: Callable[[], T]) -> T:
        """Do something with the database; again in memory, if it fails or holds what slurmtrain has not written."""
        try:
            try:
                return action()
            except ConnectionLost:
                # With a new connection: the server may only have been restarted, or the file replaced.
                if isinstance(self.address, Path):
                    self._engine.dispose()
                    self._open()
                return action()
        except (RegistryFailed, RegistryUnusable) as error:
            self._replace(error)
        except NOT_OURS as error:
            # In memory nothing is damaged: there it is a bug.
            if self.in_memory or self._spare is None:
                raise
            # What the action raises with what the run directories hold is no fault of the file's.
            engine, self._engine = self._engine, sqlite.engine_in_memory()
            try:
                with self.begin() as transaction:
                    self._spare.fill(transaction)
                action()
            finally:
                self._engine = engine
            self._replace(damaged_value(error, self.address))
        # This comes to an end: a file is replaced once, and what fails in memory is raised.
        return self._try(action)

    def _open(self) -> None:
        # Before it is opened: only this file may be put aside if it is damaged.
        self._file = sqlite.device_and_inode(self.address) if isinstance(self.address, Path) else None
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
        self._spare.warn(f"{error}{problem}; until that is fixed, commands read the run directories instead")
        self.in_memory = True
        self._engine = sqlite.engine_in_memory()
        with self.begin() as transaction:
            self._spare.fill(transaction)

    def _start_anew(self, error: RegistryDamaged, spare: Spare) -> bool:
        """Put a damaged file aside, once, and fill a new one; whether there is one now.

        A kill leaves the damaged file, none or a new one; the next command reads whatever that does not have.
        """
        # Once: a file that is damaged again at once lies on a failing disk.
        if self._was_damaged or spare.note is None or not isinstance(self.address, Path):
            return False
        self._was_damaged = True
        # Opening may have failed before there was any.
        if "_engine" in vars(self):
            self._engine.dispose()
        kept = put_registry_aside(self.address, "damaged", only=self._file)
        if kept is not None:
            spare.note(
                f"the registry {self.address} was damaged ({error.__cause__ or error}): it was kept as {kept}, and a "
                "new one is being made from the run directories"
            )
        self._open()
        # Also if another command has put the file aside: it may not have filled the new one yet.
        with self.begin() as transaction:
            spare.fill(transaction)
        return True
