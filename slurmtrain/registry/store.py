"""The registry's verbs. Nothing else speaks SQL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from slurmtrain.model.interruption.statistics import AttemptSpan
from slurmtrain.model.preflight.node_ledger import LedgerEntry
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal import Garbage, read_event
from slurmtrain.model.run.progress import Progress
from slurmtrain.model.run.run import ENDED, Attempt, Checkpoint, Live, Run
from slurmtrain.registry import schema
from slurmtrain.registry.database import open_engine, reading

_RUN_COLUMNS = {f.name for f in fields(Run)} & {column.name for column in schema.run.columns}
_JSON_COLUMNS = [name for name in _RUN_COLUMNS if isinstance(schema.run.c[name].type, sa.JSON)]
# JSON as text: decoding that of a thousand runs takes longer than fetching it.
_LISTED = sa.select(
    *(sa.type_coerce(c, sa.String).label(c.name) if isinstance(c.type, sa.JSON) else c for c in schema.run.columns)
).order_by(schema.run.c.id)
# What the time of an attempt was spent on has a table of its own.
_ATTEMPT_COLUMNS = {f.name for f in fields(Attempt)} - {"spent"}
_CHECKPOINT_COLUMNS = {f.name for f in fields(Checkpoint)}
_LEDGER_COLUMNS = {f.name for f in fields(LedgerEntry)}


@dataclass(frozen=True, slots=True)
class Listed:
    """A run as lists show it. ``row`` is the registry's; its JSON is decoded when ``run`` is asked for, not before.

    ``live`` is what the scheduler says right now, which is not kept.
    """

    row: Mapping[str, Any]
    live: Live | None = None

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def ended(self) -> bool:
        return self.row["state"] in ENDED

    @property
    def state(self) -> str:
        return str(self.row["state"])

    @property
    def settled(self) -> bool:
        """Whether nothing more can come."""
        return bool(self.row["settled"])

    @property
    def scanned(self) -> tuple[int, int]:
        """Times (ns) of the run's directories when they were last read."""
        return (self.row["journals_at"], self.row["attempts_at"])

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
    def run(self) -> Run:
        """The run, without its attempts and checkpoints."""
        return _run({**self.row, **{name: json.loads(self.row[name] or "null") for name in _JSON_COLUMNS}})

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one."""
        found = json.loads(self.row["checkpoint"] or "null")
        return Checkpoint(**found) if found else None


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


class Store:
    """The registry of one runs root."""

    def __init__(self, path: Path) -> None:
        """Raises RegistryUnusable for a file that is no registry, PlaceError for one that cannot be opened."""
        self.path = path
        self._engine = open_engine(path)

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def listed(self) -> dict[str, Listed]:
        """All runs by id, oldest first, without their older attempts and checkpoints."""
        with reading(self._engine) as connection:
            rows = connection.execute(_LISTED)
            return {row.id: Listed(_mapping(row)) for row in rows}

    def load(self, run_id: str) -> Run | None:
        """One run with all attempts and checkpoints."""
        with reading(self._engine) as connection:
            row = connection.execute(sa.select(schema.run).where(schema.run.c.id == run_id)).one_or_none()
            if row is None:
                return None
            attempts = connection.execute(_of(schema.attempt, run_id).order_by(schema.attempt.c.number)).all()
            checkpoints = connection.execute(_of(schema.checkpoint, run_id)).all()
            spent: dict[int, dict[str, float]] = {}
            for one in connection.execute(_of(schema.attempt_seconds, run_id)):
                spent.setdefault(one.attempt, {})[one.kind] = one.seconds
        return _run(
            _mapping(row),
            attempts=[
                Attempt(**_only(_mapping(one), _ATTEMPT_COLUMNS), spent=spent.get(one.number, {})) for one in attempts
            ],
            checkpoints=sorted(
                (Checkpoint(**_only(_mapping(one), _CHECKPOINT_COLUMNS)) for one in checkpoints),
                key=lambda one: one.order,
            ),
        )

    def events(self, run_id: str, kind: str) -> list[AnyEvent]:
        """A run's events of one kind, in no order."""
        with reading(self._engine) as connection:
            rows = connection.execute(_of(schema.event, run_id).where(schema.event.c.kind == kind)).all()
        return _events(rows)

    def ledger(self) -> list[LedgerEntry]:
        """All nodes that failed a preflight, the oldest finding first."""
        order = (schema.ledger.c.seen_at, schema.ledger.c.host, schema.ledger.c.run_id)
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(schema.ledger).order_by(*order)).all()
        return [LedgerEntry(**_only(_mapping(row), _LEDGER_COLUMNS)) for row in rows]

    def past(self, run_id: str, name: str, executor: str, partition: str, since: float) -> PartitionHistory:
        """What is known of interruptions in a partition since then, and of the saves of a run, or of its namesakes.

        ``partition`` is as ``submitting`` events have it; of attempts that are not over only the time counts of which
        their metrics tell.
        """
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
        """Lines of a run's journals that are no records."""
        with reading(self._engine) as connection:
            rows = connection.execute(_of(schema.garbage, run_id).order_by(schema.garbage.c.source))
            return [Garbage(row.source, row.offset, row.line) for row in rows]

    def offsets(self, run_id: str) -> dict[str, int]:
        """How far each file of a run has been read."""
        with reading(self._engine) as connection:
            return {row.path: row.offset for row in connection.execute(_of(schema.source, run_id))}

    def mirrors(self) -> dict[str, Mirrored]:
        """What has been sent to the tracking store, by run id."""
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(schema.mirror))
            return {row.run_id: Mirrored(row.uri, row.offsets, row.revision) for row in rows}

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self) -> Writing:
        """A transaction; use it as ``with store.begin() as writing:``. All of it happens, or nothing."""
        return Writing(self._engine)


class Writing:
    """The verbs of a transaction that holds the registry's write lock from its start."""

    def __init__(self, engine: sa.Engine) -> None:
        self._transaction = engine.begin()

    def __enter__(self) -> Writing:
        self._connection = self._transaction.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._transaction.__exit__(*error)

    def clear(self) -> None:
        """Forget everything, what was sent to tracking stores included: sending it again adds nothing there."""
        for table in schema.metadata.tables.values():
            if table is not schema.alembic_version:
                self._connection.execute(table.delete())

    def offsets(self, run_id: str) -> dict[str, int]:
        """How far each file of a run has been read."""
        return {row.path: row.offset for row in self._connection.execute(_of(schema.source, run_id))}

    def forget(self, run_id: str, source: str) -> None:
        """Take out what was read of a file that has shrunk, so that it is read again from its start."""
        for table in (schema.event, schema.garbage):
            self._connection.execute(table.delete().where(table.c.run_id == run_id, table.c.source == source))
        where = (schema.source.c.run_id == run_id, schema.source.c.path == source)
        self._connection.execute(schema.source.delete().where(*where))

    def add(self, run_id: str, events: Iterable[AnyEvent], garbage: Iterable[Garbage]) -> None:
        """Keep events and garbage of a run; what is known already changes nothing."""
        rows = [
            {
                "run_id": run_id,
                "source": e.source,
                "offset": e.offset,
                "time": e.time,
                "kind": e.kind,
                "data": e.payload.to_json(),
            }
            for e in events
        ]
        if rows:
            self._connection.execute(schema.event.insert().prefix_with("OR IGNORE"), rows)
        lines = [{"run_id": run_id, "source": g.source, "offset": g.offset, "line": g.line} for g in garbage]
        if lines:
            self._connection.execute(schema.garbage.insert().prefix_with("OR IGNORE"), lines)

    def set_offset(self, run_id: str, source: str, offset: int) -> None:
        self._replace(schema.source, {"run_id": run_id, "path": source, "offset": offset})

    def events(self, run_id: str) -> list[AnyEvent]:
        """All events of a run, in no order."""
        rows = self._connection.execute(_of(schema.event, run_id))
        return _events(rows)

    def progress(self, run_id: str) -> dict[str, Progress]:
        """What the metrics of each attempt add up to."""
        rows = self._connection.execute(_of(schema.progress, run_id))
        return {row.attempt_key: Progress(row.last_step, row.last_time, row.metrics) for row in rows}

    def set_progress(self, run_id: str, attempt_key: str, progress: Progress) -> None:
        row = {
            "run_id": run_id,
            "attempt_key": attempt_key,
            **{f.name: getattr(progress, f.name) for f in fields(Progress)},
        }
        self._replace(schema.progress, row)

    def put(self, run: Run, against: Sequence[LedgerEntry] = (), *, settled: bool, scanned: Sequence[int]) -> None:
        """Store a run as it was folded, and what it says against nodes, in place of what was there."""
        for table in (schema.attempt, schema.attempt_seconds, schema.checkpoint, schema.ledger):
            self._connection.execute(table.delete().where(table.c.run_id == run.id))
        if run.attempts:
            self._connection.execute(schema.attempt.insert(), [_row(a, _ATTEMPT_COLUMNS, run.id) for a in run.attempts])
        spent = [
            {"run_id": run.id, "attempt": attempt.number, "kind": kind, "seconds": seconds}
            for attempt in run.attempts
            for kind, seconds in attempt.spent.items()
        ]
        if spent:
            self._connection.execute(schema.attempt_seconds.insert(), spent)
        if run.checkpoints:
            rows = [_row(c, _CHECKPOINT_COLUMNS, run.id) for c in run.checkpoints]
            self._connection.execute(schema.checkpoint.insert(), rows)
        if against:
            self._connection.execute(schema.ledger.insert(), [_row(one, _LEDGER_COLUMNS) for one in against])
        newest = run.newest
        self._replace(
            schema.run,
            {
                **{name: getattr(run, name) for name in _RUN_COLUMNS},
                "job_id": (newest.job_id or None) if newest else None,
                "attempt": newest.number if newest else 0,
                "checkpoint": _row(run.checkpoint, _CHECKPOINT_COLUMNS) if run.checkpoint else None,
                "settled": settled,
                "journals_at": scanned[0] if scanned else 0,
                "attempts_at": scanned[1] if scanned else 0,
                "revision": sum(self.offsets(run.id).values()),
            },
        )

    def settle(self, run_id: str, scanned: Sequence[int]) -> None:
        """Note that nothing more can come of a run, whose directories have these times."""
        times = {"journals_at": scanned[0], "attempts_at": scanned[1]} if scanned else {}
        self._connection.execute(schema.run.update().where(schema.run.c.id == run_id).values(settled=True, **times))

    def set_mirrored(self, run_id: str, mirrored: Mirrored) -> None:
        row = {"run_id": run_id, "uri": mirrored.uri, "offsets": dict(mirrored.offsets), "revision": mirrored.revision}
        self._replace(schema.mirror, row)

    def _replace(self, table: sa.Table, row: Mapping[str, Any]) -> None:
        self._connection.execute(table.insert().prefix_with("OR REPLACE"), dict(row))


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


def _mapping(row: sa.Row[Any]) -> dict[str, Any]:
    return dict(row._mapping)


def _of(table: sa.Table, run_id: str) -> sa.Select[Any]:
    return sa.select(table).where(table.c.run_id == run_id)


def _events(rows: Iterable[sa.Row[Any]]) -> list[AnyEvent]:
    events = (read_event({**row.data, "t": row.time, "kind": row.kind}, row.source, row.offset) for row in rows)
    return [event for event in events if event is not None]


def _row(record: Any, columns: Iterable[str], run_id: str | None = None) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in columns}
    return row if run_id is None else {"run_id": run_id, **row}


def _only(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in columns}


def _run(row: Mapping[str, Any], **more: Any) -> Run:
    return Run(**_only(row, _RUN_COLUMNS), **more)
