"""The tables, and their version."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from slurmtrain.errors import RegistryUnusable
from slurmtrain.registry.dialects import TEXT, Json

# Increase this with every change to the tables or to the meaning of their values: a registry of an earlier version is
# rebuilt from the run directories. A test knows the tables of each version.
VERSION = 14

metadata = sa.MetaData()

run = sa.Table(
    "run",
    metadata,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("name", TEXT, nullable=False, index=True),
    sa.Column("state", TEXT, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("executor", TEXT, nullable=False),
    sa.Column("plan_hash", TEXT),
    sa.Column("submitted_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("step", sa.BigInteger),
    sa.Column("total_steps", sa.BigInteger),
    sa.Column("metrics", Json, nullable=False),
    sa.Column("lost_steps", sa.BigInteger),
    sa.Column("mlflow_run_id", TEXT),
    sa.Column("git", Json),
    sa.Column("cancelled", sa.Boolean, nullable=False),
    sa.Column("save_problem", TEXT, nullable=False),
    sa.Column("goodput", sa.Float),
    sa.Column("params", Json, nullable=False),
    sa.Column("written", Json, nullable=False),
    sa.Column("command", TEXT),
    sa.Column("resources", Json, nullable=False),
    sa.Column("tracked", sa.Boolean),
    sa.Column("sweep", TEXT),
    sa.Column("parents", Json, nullable=False),
    sa.Column("tags", Json, nullable=False),
    sa.Column("note", TEXT, nullable=False),
    sa.Column("archived", sa.Boolean, nullable=False),
    sa.Column("deleted_at", sa.Float),
    sa.Column("freed", sa.BigInteger),
    # What the list of runs shows of the newest attempt and checkpoint, so that it reads one table.
    sa.Column("job_id", TEXT),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("cause", TEXT),
    sa.Column("nodes", Json, nullable=False),
    sa.Column("checkpoint", Json),
    # Whether it has ended for good, and its folders' times (ns) at the last scan, to notice if one does.
    sa.Column("settled", sa.Boolean, nullable=False),
    sa.Column("journals_at", sa.BigInteger, nullable=False),
    sa.Column("attempts_at", sa.BigInteger, nullable=False),
    # How many bytes of journals and metrics have been read: grows with every new fact.
    sa.Column("revision", sa.BigInteger, nullable=False),
    # For commands that look at few of many runs (``registry/choice/index.py``).
    sa.Index("run_state", "state"),
    sa.Index("run_sweep", "sweep"),
    sa.Index("run_ended_at", "ended_at"),
)
# Not an Index: its option for PostgreSQL would make every command import that dialect, and all of its drivers.
for _dialect, _condition in {"sqlite": "settled = 0", "postgresql": "NOT settled"}.items():
    _index = sa.DDL(f"CREATE INDEX run_unsettled ON run (id) WHERE {_condition}")  # type: ignore[no-untyped-call]
    sa.event.listen(run, "after_create", _index.execute_if(dialect=_dialect))
# The few runs that come from others.
for _dialect in ("sqlite", "postgresql"):
    _index = sa.DDL("CREATE INDEX run_with_parents ON run (id) WHERE parents != '[]'")  # type: ignore[no-untyped-call]
    sa.event.listen(run, "after_create", _index.execute_if(dialect=_dialect))
sa.Index("run_archived", run.c.archived, run.c.id)

attempt = sa.Table(
    "attempt",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("job_id", TEXT, nullable=False),
    sa.Column("restart", sa.BigInteger, nullable=False),
    sa.Column("state", TEXT, nullable=False),
    sa.Column("cause", TEXT),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("hosts", Json, nullable=False),
    sa.Column("submitted_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("first_step", sa.BigInteger),
    sa.Column("last_step", sa.BigInteger),
    sa.Column("lost_steps", sa.BigInteger),
    sa.Column("master_addr", TEXT),
    sa.Column("master_port", sa.BigInteger),
    sa.Column("interfaces", Json, nullable=False),
    sa.Column("network", Json, nullable=False),
    sa.Column("clock", Json, nullable=False),
    sa.Column("checks", Json, nullable=False),
    sa.Column("failures", Json, nullable=False),
    sa.Column("overrides", Json, nullable=False),
    sa.Column("from_start", sa.Boolean, nullable=False),
    sa.Column("processes", Json, nullable=False),
    sa.Column("handed_over", sa.Boolean, nullable=False),
    sa.Column("submission", sa.BigInteger, nullable=False),
    sa.Column("submitted_from", TEXT),
    sa.Column("absent_since", sa.Float),
    sa.Column("confirmed", sa.Boolean, nullable=False),
    sa.Column("without", Json, nullable=False),
    sa.Column("inherited", Json, nullable=False),
    sa.Column("executor", TEXT, nullable=False),
    sa.Column("asked_by", TEXT, nullable=False),
    sa.Column("pack", sa.BigInteger, nullable=False),
    sa.Column("share_gpu", sa.Boolean, nullable=False),
    sa.Column("policy", Json),
    sa.Column("excluded", Json, nullable=False),
    sa.Column("restarted_by", TEXT),
    sa.Column("again_at", sa.Float),
    sa.Column("requeue_problem", TEXT, nullable=False),
    sa.Column("interval", Json, nullable=False),
    sa.Column("shares", Json, nullable=False),
    sa.Column("hardware", Json, nullable=False),
    sa.Column("save_problem", TEXT, nullable=False),
    sa.Column("restarts", Json, nullable=False),
    sa.Column("last_word", sa.Boolean, nullable=False),
    sa.Column("round_step", sa.BigInteger),
    sa.Column("began_from", TEXT),
    sa.Column("left", TEXT),
    sa.Column("passed_over", Json, nullable=False),
    sa.Column("hangs", Json, nullable=False),
    sa.Column("raised_limits", Json, nullable=False),
    sa.Column("stragglers", Json, nullable=False),
    sa.Column("evidence", Json, nullable=False),
)

# What the time of each attempt was spent on: one row for each kind (``model/run/accounting.py``), including zeros.
attempt_seconds = sa.Table(
    "attempt_seconds",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True),
    sa.Column("kind", TEXT, primary_key=True),
    sa.Column("seconds", sa.Float, nullable=False),
)

# The node ledger: nodes that failed the preflight of an attempt. Forgiven findings are in separate journals.
ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("attempt_key", TEXT, primary_key=True),
    sa.Column("host", TEXT, primary_key=True),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("checks", Json, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("evidence", Json, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
)

# Every checkpoint, including deleted ones. ``saved_at`` is in the key since a run that starts again reuses paths.
checkpoint = sa.Table(
    "checkpoint",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("path", TEXT, primary_key=True),
    sa.Column("saved_at", sa.Float, primary_key=True),
    sa.Column("step", sa.BigInteger),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Float),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("verified", sa.Boolean, nullable=False),
    sa.Column("stall_s", sa.Float),
    sa.Column("why", TEXT, nullable=False),
    sa.Column("metrics", Json, nullable=False),
    sa.Column("attempt", sa.BigInteger),
    sa.Column("pruned_at", sa.Float),
    sa.Column("verified_at", sa.Float),
    sa.Column("format", TEXT),
    sa.Column("step_from", TEXT),
)

event = sa.Table(
    "event",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("source", TEXT, primary_key=True),
    sa.Column("offset", sa.BigInteger, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("kind", TEXT, nullable=False),
    sa.Column("data", Json, nullable=False),
)

# How far each file of a run has been read, in bytes.
source = sa.Table(
    "source",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("path", TEXT, primary_key=True),
    sa.Column("offset", sa.BigInteger, nullable=False),
)

# What a run that has not ended is built from (``model/run/fold.py``), so that the next reading only adds what is new.
# If a run that has ended starts again, its events are read again instead.
builder = sa.Table(
    "builder",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("facts", Json, nullable=False),
)

progress = sa.Table(
    "progress",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("attempt_key", TEXT, primary_key=True),
    sa.Column("last_step", sa.BigInteger),
    sa.Column("last_time", sa.Float),
    sa.Column("metrics", Json, nullable=False),
)

# What survives of each metric after rollbacks: the newest point, and the smallest and largest finite values.
metric = sa.Table(
    "metric",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("name", TEXT, primary_key=True),
    sa.Column("points", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    # NULL if it is not a number.
    sa.Column("last", sa.Float),
    sa.Column("min", sa.Float),
    sa.Column("min_step", sa.BigInteger),
    sa.Column("max", sa.Float),
    sa.Column("max_step", sa.BigInteger),
    sa.Index("metric_last", "name", "last", "run_id"),
)

# What a run's rows in ``metric`` were made of (``model/metrics/summary.py``), so that the next reading adds to them.
line = sa.Table(
    "line",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("made_of", Json, nullable=False),
)

# Lines of journals that are not records, kept for inspection.
garbage = sa.Table(
    "garbage",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("source", TEXT, primary_key=True),
    sa.Column("offset", sa.BigInteger, primary_key=True),
    sa.Column("line", sa.LargeBinary, nullable=False),
    sa.Column("why", TEXT, nullable=False),
)

# How much of a run each tracker has (:class:`slurmtrain.registry.sent.Sent`). Directories of runs that earlier versions
# have sent do not have this, so the table survives a change of the version.
sent = sa.Table(
    "sent",
    metadata,
    sa.Column("run_id", TEXT, primary_key=True),
    sa.Column("tracker", TEXT, primary_key=True),
    sa.Column("uri", TEXT, nullable=False),
    sa.Column("remote_id", TEXT),
    sa.Column("offsets", Json, nullable=False),
    sa.Column("step", sa.BigInteger),
    sa.Column("sending", Json, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("refused", Json, nullable=False),
    sa.Column("problem", TEXT, nullable=False),
    sa.Column("since", sa.Float),
)
# What stood in its place in versions before 8.
_EARLIER_SENT = "mirror"


def is_registry(tables: Collection[str]) -> bool:
    """Whether a database with these ``tables`` is a registry, of any version."""
    return {run.name, event.name} <= set(tables) and bool({sent.name, _EARLIER_SENT} & set(tables))


def is_json(column: sa.Column[Any]) -> bool:
    """Whether a column holds JSON."""
    return isinstance(column.type, Json)


def replace_tables(connection: sa.Connection, present: Collection[str]) -> None:
    """Make the tables, and delete ``present`` ones of an earlier version, except for tables that must survive."""
    for name in set(present) - {sent.name, _EARLIER_SENT}:
        connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData())))
    metadata.create_all(connection)
    if _EARLIER_SENT in present:
        _carry_over(connection)


def _carry_over(connection: sa.Connection) -> None:
    """Move what is known of MLflow, then the only tracker, to its new table."""
    names = ("run_id", "uri", "offsets", "revision")
    earlier = sa.Table(_EARLIER_SENT, sa.MetaData(), *(sa.Column(name) for name in names))
    for row in connection.execute(sa.select(earlier)).mappings().all():
        offsets = json.loads(row["offsets"])
        # The names of refused metrics were among the offsets.
        refused = offsets.pop("refused", [])
        values = {"tracker": "mlflow", "sending": "{}", "problem": "", **row}
        connection.execute(sent.insert(), {**values, "offsets": json.dumps(offsets), "refused": json.dumps(refused)})
    connection.execute(sa.schema.DropTable(earlier))


def not_of_this_version(registry: str, version: int | None) -> RegistryUnusable:
    """Why a registry cannot be read as it is. ``version``: version of its tables, an earlier one; None: it has none."""
    if version is None:
        return RegistryUnusable(f"there is no registry at {registry}")
    return RegistryUnusable(
        f"{registry} is a registry of an earlier version; any command that uses it, such as 'slurmtrain status', "
        "brings it up to date"
    )
