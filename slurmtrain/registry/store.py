"""The registry's verbs for reading. Only this package speaks SQL."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from slurmtrain.model.run.events.base import Event, P, select
from slurmtrain.model.run.run import ENDED
from slurmtrain.registry import queries, schema
from slurmtrain.registry.database import open_engine, reading
from slurmtrain.system.journal_files import has_unread, journal_files

if TYPE_CHECKING:
    from slurmtrain.model.interruption.statistics import AttemptSpan
    from slurmtrain.model.preflight.node_ledger import LedgerEntry
    from slurmtrain.model.run.journal import Garbage
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.model.run.run import Checkpoint, Live, Run
    from slurmtrain.registry.transaction import Transaction


class IndexRow(NamedTuple):
    """What every command needs of every run: the least that it takes to choose runs and to see which to read."""

    id: str
    name: str
    state: str
    settled: bool
    """Whether nothing more can come."""
    journals_at: int
    attempts_at: int

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def scanned(self) -> tuple[int, int]:
        """Times (ns) of the run's folders when its files were last listed."""
        return (self.journals_at, self.attempts_at)


@dataclass(frozen=True, slots=True)
class Listed:
    """A run as lists show it. ``row`` is the registry's; its JSON is decoded when it is asked for, not before.

    ``live`` is what the scheduler says right now, which is not kept.
    """

    row: Mapping[str, Any]
    live: Live | None = None

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def state(self) -> str:
        return str(self.row["state"])

    @property
    def reason(self) -> str:
        """Why it is in this state, in a sentence; empty where there is nothing to say."""
        return str(self.row["reason"])

    @property
    def settled(self) -> bool:
        """Whether nothing more can come."""
        return bool(self.row["settled"])

    @property
    def revision(self) -> int:
        """Grows with every new fact."""
        return int(self.row["revision"])

    @property
    def job_id(self) -> str | None:
        """Of the newest attempt."""
        return None if self.row["job_id"] is None else str(self.row["job_id"])

    @property
    def attempt(self) -> int:
        """How many attempts there were."""
        return int(self.row["attempt"])

    @property
    def metrics(self) -> dict[str, float]:
        """The latest values."""
        return dict(json.loads(self.row["metrics"]))

    @property
    def git(self) -> dict[str, Any] | None:
        """What is known of the repository that the run was submitted from."""
        git: dict[str, Any] | None = json.loads(self.row["git"] or "null")
        return git

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one that the run can start from."""
        from slurmtrain.model.run.run import Checkpoint

        fields = json.loads(self.row["checkpoint"] or "null")
        return Checkpoint(**fields) if fields else None


@dataclass(frozen=True, slots=True)
class PartitionHistory:
    """What attempts have seen where a run is to go, and what its own last save, or one of its namesakes', has cost."""

    lived: Sequence[AttemptSpan] = ()
    stall_s: float | None = None
    save_s: float | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What of a run the tracking store at ``uri`` has."""

    uri: str
    offsets: Mapping[str, int]
    revision: int


_INDEX = sa.select(*(schema.run.c[name] for name in IndexRow._fields)).order_by(schema.run.c.id)


class Store:
    """The registry of one runs root."""

    def __init__(self, path: Path) -> None:
        """Raises RegistryUnusable for a file that is no registry, PlaceError for one that cannot be opened."""
        self.path = path
        self._engine = open_engine(path)

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def index(self) -> dict[str, IndexRow]:
        """All runs by id, oldest first."""
        with reading(self._engine) as connection:
            return {row[0]: IndexRow._make(row) for row in connection.execute(_INDEX).all()}

    def listed(self, run_ids: Collection[str] | None = None) -> dict[str, Listed]:
        """These runs, or all, by id, oldest first, without their older attempts and checkpoints."""
        with reading(self._engine) as connection:
            rows = queries.rows(connection, schema.run, run_ids)
            return {row["id"]: Listed(row) for row in sorted(rows, key=lambda row: str(row["id"]))}

    def load(self, run_id: str) -> Run | None:
        """One run with all attempts and checkpoints."""
        return self.load_all([run_id]).get(run_id)

    def load_all(self, run_ids: Collection[str]) -> dict[str, Run]:
        """Those of these runs that are known, with all attempts and checkpoints."""
        from slurmtrain.registry import rows

        with reading(self._engine) as connection:
            runs = list(queries.rows(connection, schema.run, run_ids))
            attempts = queries.rows_by_run(connection, schema.attempt, run_ids)
            checkpoints = queries.rows_by_run(connection, schema.checkpoint, run_ids)
            seconds = queries.spent_seconds(connection, run_ids)
        return {row["id"]: rows.run_of(row, attempts[row["id"]], checkpoints[row["id"]], seconds) for row in runs}

    def events(self, run_id: str, cls: type[P]) -> list[Event[P]]:
        """A run's events of one kind, in no order. ``cls``: the class of their payload, one of a kind."""
        from slurmtrain.registry.fact_rows import event_of

        with reading(self._engine) as connection:
            rows = queries.rows(connection, schema.event, [run_id], schema.event.c.kind == cls.KIND)
            return select([event for row in rows if (event := event_of(row)) is not None], cls)

    def ledger(self) -> list[LedgerEntry]:
        """All nodes that failed a preflight, the oldest finding first."""
        from slurmtrain.registry.fact_rows import LEDGER

        with reading(self._engine) as connection:
            rows = list(queries.rows(connection, schema.ledger))
        rows.sort(key=lambda row: (row["seen_at"], row["host"], row["run_id"]))
        return [LEDGER.read(row) for row in rows]

    def past(self, run_id: str, name: str, executor: str, partition: str, since: float) -> PartitionHistory:
        """What is known of interruptions in a partition since then, and of the saves of a run, or of its namesakes.

        ``partition`` is as ``submitting`` events have it; of attempts that are not over only the time counts of which
        their metrics tell.
        """
        from slurmtrain.model.interruption.statistics import AttemptSpan

        with reading(self._engine) as connection:
            attempts = connection.execute(_lived(executor, partition, since)).all()
            save = connection.execute(_last_save(run_id, name, executor)).one_or_none()
        lived = [
            AttemptSpan(max(0.0, row.until - row.started_at) * row.nodes, row.cause, json.loads(row.failures or "[]"))
            for row in attempts
        ]
        return (
            PartitionHistory(lived, save.stall_s, save.seconds, save.run_id == run_id)
            if save
            else PartitionHistory(lived)
        )

    def garbage(self, run_id: str) -> list[Garbage]:
        """Lines of a run's journals that are no records, by journal."""
        from slurmtrain.registry.fact_rows import GARBAGE

        with reading(self._engine) as connection:
            rows = list(queries.rows(connection, schema.garbage, [run_id]))
        rows.sort(key=lambda row: (row["source"], row["offset"]))
        return [GARBAGE.read(row) for row in rows]

    def offsets(self, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """How far each file of these runs has been read, in bytes: by run, then by the file's name."""
        with reading(self._engine) as connection:
            return queries.offsets(connection, run_ids)

    def unread(self, directories: Sequence[RunDir]) -> list[RunDir]:
        """Those of these run directories whose files hold bytes that were not read; takes no write lock."""
        if not directories:
            return []
        offsets = self.offsets([directory.id for directory in directories])
        return [run for run in directories if has_unread(journal_files(run), offsets.get(run.id, {}))]

    def mirrors(self) -> dict[str, Mirrored]:
        """What has been sent to the tracking store, by run id."""
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(schema.mirror))
            return {row.run_id: Mirrored(row.uri, row.offsets, row.revision) for row in rows}

    def begin(self) -> Transaction:
        """A transaction; use it as ``with store.begin() as transaction:``. All of it happens, or nothing."""
        from slurmtrain.registry.transaction import Transaction

        return Transaction(self._engine)


# Of so many runs of a name, the newest, the last save is looked for.
_NAMESAKES = 20


def _lived(executor: str, partition: str, since: float) -> sa.Select[Any]:
    """Attempts that began since then: ``started_at``, ``until``, ``nodes``, ``cause``, and ``failures`` of crashes."""
    attempt, run, progress, event = schema.attempt, schema.run, schema.progress, schema.event
    nodes = sa.select(sa.func.count()).select_from(sa.func.json_each(attempt.c.hosts).table_valued("key"))
    key = attempt.c.job_id + "." + sa.cast(attempt.c.restart, sa.String)
    told = sa.and_(progress.c.run_id == attempt.c.run_id, progress.c.attempt_key == key)
    failures = sa.case((attempt.c.cause == "crash", sa.type_coerce(attempt.c.failures, sa.String)))
    until = sa.func.coalesce(attempt.c.ended_at, progress.c.last_time, attempt.c.started_at)
    query = (
        sa.select(
            attempt.c.started_at,
            until.label("until"),
            nodes.scalar_subquery().label("nodes"),
            attempt.c.cause,
            failures.label("failures"),
        )
        .join_from(attempt, run, run.c.id == attempt.c.run_id)
        .outerjoin(progress, told)
        .where(run.c.executor == executor, attempt.c.started_at >= since)
    )
    if not partition:
        return query
    # The primary key of events begins with the run and the journal: those of commands are few.
    return query.where(
        sa.exists().where(
            event.c.run_id == attempt.c.run_id,
            event.c.source.between("journal/", "journal0"),
            event.c.kind == "submitting",
            sa.func.json_extract(event.c.data, "$.submission") == attempt.c.submission,
            sa.func.json_extract(event.c.data, "$.partition") == partition,
        )
    )


def _last_save(run_id: str, name: str, executor: str) -> sa.Select[Any]:
    """The last save of a run whose duration is known, or else of the newest runs of its name."""
    checkpoint, run = schema.checkpoint, schema.run
    namesakes = sa.select(run.c.id).where(run.c.name == name, run.c.executor == executor)
    newest = namesakes.order_by(run.c.id.desc()).limit(_NAMESAKES)
    return (
        sa.select(checkpoint.c.run_id, checkpoint.c.stall_s, checkpoint.c.seconds)
        .where(
            sa.or_(checkpoint.c.run_id == run_id, checkpoint.c.run_id.in_(newest)), checkpoint.c.seconds.is_not(None)
        )
        .order_by((checkpoint.c.run_id == run_id).desc(), checkpoint.c.run_id.desc(), checkpoint.c.saved_at.desc())
        .limit(1)
    )
