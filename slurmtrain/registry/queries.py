"""What is asked of the registry, about many runs in one statement.

The ids of the runs are passed to the database as one JSON array, so there is no limit to their number, and a query
about ten thousand runs takes as many statements as one about a single run. Questions about which runs there are, and
which may change, take milliseconds for a hundred thousand runs, except for all rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from slurmtrain.model.run.events.base import is_text
from slurmtrain.model.run.layout import RUN_ID
from slurmtrain.model.run.run import ENDED, RUN_STATES, UNREADABLE
from slurmtrain.registry import schema

if TYPE_CHECKING:
    from slurmtrain.model.interruption.interval import AttemptSpan
    from slurmtrain.model.metrics.columns import MetricSummary
    from slurmtrain.model.metrics.curves import LineSummary
    from slurmtrain.model.run.events.base import AnyEvent
    from slurmtrain.model.run.journal_lines import Garbage, Progress
    from slurmtrain.model.run.run import Attempt, LedgerEntry, Run
    from slurmtrain.registry.cells import Sent

_OPEN = tuple(state for state in RUN_STATES if state not in ENDED)
# Follows every character of an id.
_AFTER = "~"
# The last save is looked for in at most this many runs of the same name, the newest ones.
_NAMESAKES = 20
# And so many completed runs with any of several names say what others will cost.
_MOST_NAMESAKES = 1000


class IndexRow(NamedTuple):
    """What every command needs to know about every run: the minimum for selecting runs and deciding which to read."""

    id: str
    name: str
    state: str
    settled: bool
    """Whether it has ended and no process can still write to it."""
    journals_at: int
    attempts_at: int
    sweep: str | None = None
    """The id of its sweep."""
    archived: bool = False
    """Whether lists leave it out."""
    deleted_at: float | None = None
    freed: int | None = None
    """How many bytes the deletion of its files freed; None: it is not complete."""

    @property
    def ended(self) -> bool:
        """Whether it has ended; it may still be started again."""
        return self.state in ENDED

    @property
    def put_away(self) -> bool:
        """Whether lists leave it out, since it is archived or deleted; not while it runs, which costs something."""
        return self.ended and (self.archived or (self.deleted_at is not None and self.freed is not None))

    @property
    def unreadable(self) -> bool:
        """Whether its journals cannot be read."""
        return self.state == UNREADABLE

    @property
    def scanned(self) -> tuple[int, int]:
        """Times (ns) of the run's folders when its files were last listed."""
        return (self.journals_at, self.attempts_at)


def rows(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str] | None = None, *where: sa.ColumnElement[bool]
) -> Iterator[dict[str, Any]]:
    """Rows as dicts by column, in no order, with JSON as text.

    Args:
        connection: The connection to query.
        table: Any table whose rows belong to runs.
        run_ids: The runs; None for all.
        where: Further conditions on the rows.
    """
    names = table.columns.keys()
    # Plain dicts of plain tuples: SQLAlchemy's own mapping of a row takes three times as long.
    return (dict(zip(names, row, strict=True)) for row in _execute_rows(connection, table, run_ids, *where))


def rows_by_run(
    connection: sa.Connection, table: sa.Table, run_ids: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    """Rows as :func:`rows` returns them, grouped by the id of their run; an empty list for a run without rows.

    Args:
        connection: The connection to query.
        table: Any table whose rows belong to runs.
        run_ids: The runs.
    """
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows(connection, table, run_ids):
        grouped[row["run_id"]].append(row)
    return grouped


def offsets(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """How far each file of these runs has been read, in bytes: by run, then by the file's name."""
    by_run: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows(connection, schema.source, run_ids):
        by_run[row["run_id"]][row["path"]] = row["offset"]
    return by_run


def progress_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, dict[str, Progress]]:
    """The summary of each attempt's metrics: by run, then by the name of the attempt's directory."""
    from slurmtrain.registry.rows import PROGRESS

    grouped = rows_by_run(connection, schema.progress, run_ids)
    return {run_id: {row["attempt_key"]: PROGRESS.read(row) for row in of_run} for run_id, of_run in grouped.items()}


def builder_facts(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """The facts that runs are built from, for runs that had not ended when they were last read."""
    return {row["run_id"]: json.loads(row["facts"]) for row in rows(connection, schema.builder, run_ids)}


def events(connection: sa.Connection, run_ids: Collection[str], kind: str | None = None) -> dict[str, list[AnyEvent]]:
    """The events of runs, in no order; runs without any are left out.

    Args:
        connection: The connection to query.
        run_ids: The runs.
        kind: Only events of this kind; None: all.
    """
    from slurmtrain.registry.rows import event_of

    where = () if kind is None else (schema.event.c.kind == kind,)
    by_run: dict[str, list[AnyEvent]] = {}
    for row in rows(connection, schema.event, run_ids, *where):
        if (event := event_of(row)) is not None:
            by_run.setdefault(row["run_id"], []).append(event)
    return by_run


def load_runs(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, Run]:
    """The known ones among these runs, with all attempts and checkpoints."""
    from slurmtrain.registry.rows import run_of

    runs = list(rows(connection, schema.run, run_ids))
    attempts = rows_by_run(connection, schema.attempt, run_ids)
    checkpoints = rows_by_run(connection, schema.checkpoint, run_ids)
    seconds = spent_seconds(connection, run_ids)
    return {row["id"]: run_of(row, attempts[row["id"]], checkpoints[row["id"]], seconds) for row in runs}


def charged_attempts(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[Attempt]]:
    """The attempts of runs, in order, with no more of each than costs and hours need; runs without any are left out."""
    from slurmtrain.registry.rows import CHARGED

    seconds = spent_seconds(connection, run_ids)
    by_run: dict[str, list[Attempt]] = {}
    for run_id, *values in _execute_rows(connection, schema.attempt, run_ids, names=("run_id", *CHARGED.fields)):
        row = dict(zip(CHARGED.fields, values, strict=True))
        by_run.setdefault(run_id, []).append(CHARGED.read(row, spent=seconds.get((run_id, row["number"]), {})))
    return {run_id: sorted(attempts, key=lambda each: each.number) for run_id, attempts in by_run.items()}


def completed_namesakes(connection: sa.Connection, names: Collection[str]) -> dict[str, tuple[str, str]]:
    """The name and the executor of each of the newest completed runs with these ``names``, newest first."""
    any_name = sa.func.json_texts(sa.bindparam("names")).table_valued("value")
    run = schema.run.c
    has_name = run.name.in_(sa.select(any_name.c.value)) & (run.state == "completed")
    query = sa.select(run.id, run.name, run.executor).where(has_name).order_by(run.id.desc()).limit(_MOST_NAMESAKES)
    rows = connection.execute(query, {"names": json.dumps(list(names))})
    return {str(run_id): (str(name), str(executor)) for run_id, name, executor in rows}


def sent(connection: sa.Connection, run_ids: Collection[str] | None = None) -> dict[str, dict[str, Sent]]:
    """What trackers have of these runs, or of all: by run id, then by the tracker's name."""
    from slurmtrain.registry.rows import SENT

    by_run: dict[str, dict[str, Sent]] = {}
    for row in rows(connection, schema.sent, run_ids):
        by_run.setdefault(row["run_id"], {})[row["tracker"]] = SENT.read(row)
    return by_run


def ledger(connection: sa.Connection) -> list[LedgerEntry]:
    """All findings against nodes that failed a preflight, oldest first."""
    from slurmtrain.registry.rows import LEDGER

    order = sorted(rows(connection, schema.ledger), key=lambda row: (row["seen_at"], row["host"], row["run_id"]))
    return [LEDGER.read(row) for row in order]


def garbage(connection: sa.Connection, run_id: str) -> list[Garbage]:
    """Lines of a run's journals that are not records, ordered by journal and offset."""
    from slurmtrain.registry.rows import GARBAGE

    order = sorted(rows(connection, schema.garbage, [run_id]), key=lambda row: (row["source"], row["offset"]))
    return [GARBAGE.read(row) for row in order]


def spent_seconds(connection: sa.Connection, run_ids: Collection[str]) -> dict[tuple[str, int], dict[str, float]]:
    """What the time of attempts was spent on, in seconds by kind, for each run and number of the attempt."""
    spent: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    # Eight rows for each attempt: this is by far the largest table, so no dict is made of each row.
    for run_id, attempt, kind, seconds in _execute_rows(connection, schema.attempt_seconds, run_ids):
        spent[run_id, attempt][kind] = seconds
    return spent


def fetch(
    connection: sa.Connection, query: sa.Select[Any], parameters: Mapping[str, Any] | None = None
) -> Sequence[tuple[Any, ...]]:
    """The rows of a query as the driver's own tuples: SQLAlchemy's take three times as long.

    Args:
        connection: The connection to query.
        query: What to read.
        parameters: Values of its parameters.
    """
    result = connection.execute(query, parameters or {})
    # Not by the driver's cursor alone, which would raise the driver's errors.
    rows: Sequence[tuple[Any, ...]] = result.cursor_strategy.fetchall(result, result.cursor)
    return rows


def of_runs(table: sa.Table) -> sa.ColumnElement[bool]:
    """The condition that a row belongs to one of the runs in the parameter ``ids``, a JSON array of their ids."""
    # One parameter: databases limit how many a statement may have.
    ids = sa.func.json_texts(sa.bindparam("ids")).table_valued("value")
    key = table.c.id if table is schema.run else table.c.run_id
    return key.in_(sa.select(ids.c.value))


def _execute_rows(
    connection: sa.Connection,
    table: sa.Table,
    run_ids: Collection[str] | None,
    *where: sa.ColumnElement[bool],
    names: Sequence[str] | None = None,
) -> Sequence[Any]:
    columns = [table.c[name] for name in names or table.columns.keys()]
    query = sa.select(*columns).where(*(() if run_ids is None else (of_runs(table),)), *where)
    rows = connection.execute(query, {} if run_ids is None else {"ids": json.dumps(list(run_ids))}).all()
    types = [type_of(column) for column in columns]
    # SQLite stores any value in any column.
    if not all(all(map(isinstance, row, types)) for row in rows):
        raise ValueError(f"a value of the wrong type in the table {table.name!r}")
    return rows


@cache
def type_of(column: sa.Column[Any]) -> tuple[type, ...]:
    """The types that the values of a column may have."""
    whole = (int,) if isinstance(column.type, sa.Float) else ()
    return (column.type.python_type, *whole, *((type(None),) if column.nullable else ()))


# --- which runs -------------------------------------------------------------------------------------------------------


def all_ids(connection: sa.Connection) -> frozenset[str]:
    """The ids of all runs."""
    # One text from the database is split in a tenth of the time that its driver takes for as many rows.
    text = connection.execute(sa.select(sa.func.aggregate_strings(schema.run.c.id, " "))).scalar()
    return frozenset(str(text or "").split())


def index_rows(connection: sa.Connection, run_ids: Collection[str] | None = None) -> dict[str, IndexRow]:
    """These runs, or all, by id, oldest first."""
    if run_ids is None:
        return _fetch_index(connection, _index_rows().order_by(schema.run.c.id))
    if not run_ids:
        return {}
    query = _index_rows().where(of_runs(schema.run)).order_by(schema.run.c.id)
    return _fetch_index(connection, query, {"ids": json.dumps(sorted(run_ids))})


def unsettled(connection: sa.Connection) -> dict[str, IndexRow]:
    """The runs that have not settled, by id."""
    return _fetch_index(connection, _index_rows().where(~schema.run.c.settled))


def ended_last(connection: sa.Connection, limit: int) -> dict[str, IndexRow]:
    """The settled runs that ended last, by id; at most ``limit``."""
    last = _index_rows().where(schema.run.c.settled, schema.run.c.ended_at.is_not(None))
    return _fetch_index(connection, last.order_by(schema.run.c.ended_at.desc()).limit(limit))


def named(connection: sa.Connection, names: Collection[str]) -> dict[str, IndexRow]:
    """The runs that have one of these ids, names or sweeps, or an id that begins so, oldest first; and the newest."""
    run = schema.run.c
    newest = sa.select(sa.func.max(run.id)).scalar_subquery()
    # Not BETWEEN, beside which PostgreSQL allows no collation.
    prefixes = [name.lower() for name in names if 0 < len(name) <= 10]
    prefixes = [prefix for prefix in prefixes if RUN_ID.fullmatch(prefix.ljust(10, "0"))]
    begun = [sa.and_(run.id >= prefix, run.id <= prefix + _AFTER) for prefix in prefixes]
    # No run has a name that is not text, which no database takes.
    listed = [name for name in names if is_text(name)]
    where = sa.or_(run.id == newest, run.name.in_(listed), run.sweep.in_(listed), run.id.in_(listed), *begun)
    return _fetch_index(connection, _index_rows().where(where).order_by(run.id))


def ended_since(connection: sa.Connection, at: float) -> list[str]:
    """The ids of the runs that have ended since ``at``, in seconds since 1970. ``connection``: to query."""
    run = schema.run.c
    return sorted(connection.execute(sa.select(run.id).where(run.ended_at >= at)).scalars())


def worth_listing(connection: sa.Connection, newest: int, *, folds: bool = False) -> list[str]:
    """The ids of the runs that have not ended and of the ``newest`` that are not put away, oldest first.

    Args:
        connection: The connection to query.
        newest: How many.
        folds: A sweep counts as one of the newest, and its newest run stands for it.
    """
    run = schema.run.c
    ids = set(connection.execute(sa.select(run.id).where(run.state.in_(_OPEN))).scalars())
    listed = sa.select(run.id, run.sweep).where(~run.archived, ~is_deleted())
    # Each statement reads few rows by an index; a single one for all of them would read the whole table.
    entries: dict[str, str] = {}
    further: list[sa.ColumnElement[bool]] = []
    while (room := newest - len(entries)) > 0:
        rows = connection.execute(listed.where(*further).order_by(run.id.desc()).limit(room)).all()
        for run_id, sweep in rows:
            if not (folds and sweep in entries.values()):
                entries[run_id] = sweep if folds and sweep else run_id
        if len(rows) < room:
            break
        further = [run.id < rows[-1].id, sa.or_(run.sweep.is_(None), run.sweep.not_in(entries.values()))]
    return sorted(ids | entries.keys())


def is_deleted() -> sa.ColumnElement[bool]:
    """The condition that the files of a run are deleted, all of them."""
    return schema.run.c.deleted_at.is_not(None) & schema.run.c.freed.is_not(None)


def state_counts(connection: sa.Connection) -> dict[str, int]:
    """How many runs there are in each state."""
    counts = connection.execute(sa.select(schema.run.c.state, sa.func.count()).group_by(schema.run.c.state))
    return {str(state): int(count) for state, count in counts}


def children(connection: sa.Connection, run_id: str) -> dict[str, str]:
    """The JSON of where they come from, by their ids, of the runs that come from a run, oldest first."""
    run = schema.run.c
    # The first condition is the index's: few runs come from others.
    has_it = sa.and_(run.parents != sa.literal_column("'[]'"), run.parents.contains(f'"{run_id}"', autoescape=True))
    rows = connection.execute(sa.select(run.id, run.parents).where(has_it).order_by(run.id))
    return {child: str(parents) for child, parents in rows}


def behind(connection: sa.Connection) -> list[str]:
    """The ids of runs that have begun and whose revision differs at some tracker, or at each, oldest first."""
    run, sent = schema.run.c, schema.sent.c
    of_run = sa.select(sent.run_id).where(sent.run_id == run.id)
    is_behind = sa.or_(~of_run.exists(), of_run.where(sent.revision != run.revision).exists())
    may_be_sent = sa.and_(run.attempt > 0, sa.or_(run.tracked.is_(None), run.tracked))
    return list(connection.execute(sa.select(run.id).where(may_be_sent, is_behind).order_by(run.id)).scalars())


def _fetch_index(
    connection: sa.Connection, query: sa.Select[Any], parameters: dict[str, str] | None = None
) -> dict[str, IndexRow]:
    return {row[0]: IndexRow._make(row) for row in fetch(connection, query, parameters)}


@cache
def _index_rows() -> sa.Select[Any]:
    return sa.select(*(schema.run.c[name] for name in IndexRow._fields))


# --- metrics ----------------------------------------------------------------------------------------------------------


def surviving_metrics(
    connection: sa.Connection, run_ids: Collection[str] | None, names: Collection[str] | None = None
) -> dict[str, dict[str, MetricSummary]]:
    """The summaries of these runs' metrics, by run and name.

    Args:
        connection: The connection to query.
        run_ids: The runs; None for all.
        names: The metrics; None for all.
    """
    from slurmtrain.registry.rows import METRICS

    where = () if names is None else (schema.metric.c.name.in_(sorted(names)),)
    by_run: dict[str, dict[str, MetricSummary]] = defaultdict(dict)
    for row in rows(connection, schema.metric, run_ids, *where):
        by_run[row["run_id"]][row["name"]] = METRICS.read(row)
    return by_run


def lines(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, LineSummary]:
    """The summaries of these runs' surviving lines, by run, with the record of the lines that they summarise."""
    from slurmtrain.model.metrics.curves import LineSummary

    metrics = surviving_metrics(connection, run_ids)
    return {
        row["run_id"]: LineSummary.from_json(json.loads(row["made_of"]), metrics.get(row["run_id"], {}))
        for row in rows(connection, schema.line, run_ids)
    }


# --- interruptions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionHistory:
    """How attempts in a run's partition have ended, and the cost of the last save of the run or of its namesakes.

    ``own``: whether that save is the run's own.
    """

    lived: Sequence[AttemptSpan] = ()
    stall_s: float | None = None
    save_s: float | None = None
    own: bool = False


def partition_history(
    connection: sa.Connection, run_id: str, name: str, executor: str, partition: str, since: float
) -> PartitionHistory:
    """What is known about interruptions in a partition, and about the saves of a run or of its namesakes.

    The time of an attempt that has not ended counts up to its latest metrics.

    Args:
        connection: The connection to query.
        run_id: The run.
        name: Its name.
        executor: ``slurm`` or ``local``.
        partition: The partition, as ``submitting`` events name it; empty for all.
        since: Attempts that began before this time, in seconds since 1970, do not count.
    """
    from slurmtrain.model.interruption.interval import AttemptSpan

    attempts = connection.execute(_attempts_since(executor, partition, since)).all()
    save = connection.execute(_last_save(run_id, name, executor)).one_or_none()
    lived = [
        # The two times may be by clocks of different machines, which need not agree.
        AttemptSpan(
            max(0.0, row.until - row.started_at) * len(json.loads(row.hosts)),
            row.cause,
            json.loads(row.failures or "[]"),
        )
        for row in attempts
    ]
    if save is None:
        return PartitionHistory(lived)
    return PartitionHistory(lived, save.stall_s, save.seconds, save.run_id == run_id)


def _attempts_since(executor: str, partition: str, since: float) -> sa.Select[Any]:
    """Attempts from ``since`` on: ``started_at``, ``until``, ``hosts``, ``cause``; ``failures`` of crashes."""
    attempt, run, progress, event = schema.attempt, schema.run, schema.progress, schema.event
    key = attempt.c.job_id + "." + sa.cast(attempt.c.restart, sa.String)
    of_attempt = sa.and_(progress.c.run_id == attempt.c.run_id, progress.c.attempt_key == key)
    failures = sa.case((attempt.c.cause == "crash", attempt.c.failures))
    until = sa.func.coalesce(attempt.c.ended_at, progress.c.last_time, attempt.c.started_at)
    query = (
        sa.select(
            attempt.c.started_at,
            until.label("until"),
            attempt.c.hosts,
            attempt.c.cause,
            failures.label("failures"),
        )
        .join_from(attempt, run, run.c.id == attempt.c.run_id)
        .outerjoin(progress, of_attempt)
        .where(run.c.executor == executor, attempt.c.started_at >= since)
    )
    if not partition:
        return query
    # Other events may hold what is JSON for Python only, and conditions are tested in any order.
    submitting = sa.case((event.c.kind == "submitting", event.c.data))
    # The primary key of events begins with run and journal, so this scans only the few events of commands.
    return query.where(
        sa.exists().where(
            event.c.run_id == attempt.c.run_id,
            event.c.source >= "journal/",
            event.c.source < "journal0",
            event.c.kind == "submitting",
            sa.func.text_at(submitting, "submission") == sa.cast(attempt.c.submission, sa.String),
            sa.func.text_at(submitting, "partition") == partition,
        )
    )


def _last_save(run_id: str, name: str, executor: str) -> sa.Select[Any]:
    """The last save whose duration is known: of the run itself, or else of the newest runs with its name."""
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
