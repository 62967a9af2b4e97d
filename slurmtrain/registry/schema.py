"""The tables, and their version."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

# Increase this with every change to the tables or to what they store: a registry of an earlier version is rebuilt from
# the run directories. A test knows the tables of each version.
VERSION = 7

metadata = sa.MetaData()

run = sa.Table(
    "run",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("executor", sa.String, nullable=False),
    sa.Column("plan_hash", sa.String),
    sa.Column("submitted_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("step", sa.Integer),
    sa.Column("total_steps", sa.Integer),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("lost_steps", sa.Integer),
    sa.Column("mlflow_run_id", sa.String),
    sa.Column("git", sa.JSON),
    sa.Column("cancelled", sa.Boolean, nullable=False),
    sa.Column("save_problem", sa.String, nullable=False),
    sa.Column("goodput", sa.Float),
    sa.Column("params", sa.JSON, nullable=False),
    sa.Column("command", sa.String),
    sa.Column("resources", sa.JSON, nullable=False),
    sa.Column("tracked", sa.Boolean),
    sa.Column("sweep", sa.String),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("note", sa.String, nullable=False),
    sa.Column("archived", sa.Boolean, nullable=False),
    sa.Column("deleted_at", sa.Float),
    sa.Column("freed", sa.Integer),
    # What the list of runs shows of the newest attempt and checkpoint, so that it reads one table.
    sa.Column("job_id", sa.String),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("cause", sa.String),
    sa.Column("nodes", sa.JSON, nullable=False),
    sa.Column("checkpoint", sa.JSON),
    # Whether it has ended for good, and its folders' times (ns) at the last scan, to notice if one does.
    sa.Column("settled", sa.Boolean, nullable=False),
    sa.Column("journals_at", sa.BigInteger, nullable=False),
    sa.Column("attempts_at", sa.BigInteger, nullable=False),
    # How many bytes of journals and metrics have been read: grows with every new fact.
    sa.Column("revision", sa.Integer, nullable=False),
)

attempt = sa.Table(
    "attempt",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("restart", sa.Integer, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("cause", sa.String),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("hosts", sa.JSON, nullable=False),
    sa.Column("submitted_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("first_step", sa.Integer),
    sa.Column("last_step", sa.Integer),
    sa.Column("lost_steps", sa.Integer),
    sa.Column("master_addr", sa.String),
    sa.Column("master_port", sa.Integer),
    sa.Column("interfaces", sa.JSON, nullable=False),
    sa.Column("network", sa.JSON, nullable=False),
    sa.Column("clock", sa.JSON, nullable=False),
    sa.Column("checks", sa.JSON, nullable=False),
    sa.Column("failures", sa.JSON, nullable=False),
    sa.Column("overrides", sa.JSON, nullable=False),
    sa.Column("from_start", sa.Boolean, nullable=False),
    sa.Column("processes", sa.JSON, nullable=False),
    sa.Column("handed_over", sa.Boolean, nullable=False),
    sa.Column("submission", sa.Integer, nullable=False),
    sa.Column("submitted_from", sa.String),
    sa.Column("absent_since", sa.Float),
    sa.Column("confirmed", sa.Boolean, nullable=False),
    sa.Column("without", sa.JSON, nullable=False),
    sa.Column("executor", sa.String, nullable=False),
    sa.Column("asked_by", sa.String, nullable=False),
    sa.Column("policy", sa.JSON(none_as_null=True)),
    sa.Column("excluded", sa.JSON, nullable=False),
    sa.Column("restarted_by", sa.String),
    sa.Column("again_at", sa.Float),
    sa.Column("requeue_problem", sa.String, nullable=False),
    sa.Column("interval", sa.JSON, nullable=False),
    sa.Column("save_problem", sa.String, nullable=False),
    sa.Column("restarts", sa.JSON, nullable=False),
    sa.Column("last_word", sa.Boolean, nullable=False),
    sa.Column("round_step", sa.Integer),
    sa.Column("began_from", sa.String),
    sa.Column("left", sa.String),
    sa.Column("passed_over", sa.JSON, nullable=False),
    sa.Column("hangs", sa.JSON, nullable=False),
    sa.Column("raised_limits", sa.JSON, nullable=False),
    sa.Column("stragglers", sa.JSON, nullable=False),
    sa.Column("evidence", sa.JSON, nullable=False),
)

# What the time of each attempt was spent on: one row for each kind (``model/run/accounting.py``), including zeros.
attempt_seconds = sa.Table(
    "attempt_seconds",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("seconds", sa.Float, nullable=False),
)

# The node ledger: nodes that failed the preflight of an attempt. Forgiven findings are in separate journals.
ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("attempt_key", sa.String, primary_key=True),
    sa.Column("host", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("checks", sa.JSON, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("evidence", sa.JSON, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
)

# Every checkpoint, including deleted ones. ``saved_at`` is in the key since a run that starts again reuses paths.
checkpoint = sa.Table(
    "checkpoint",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("saved_at", sa.Float, primary_key=True),
    sa.Column("step", sa.Integer),
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Column("seconds", sa.Float),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("verified", sa.Boolean, nullable=False),
    sa.Column("stall_s", sa.Float),
    sa.Column("why", sa.String, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("attempt", sa.Integer),
    sa.Column("pruned_at", sa.Float),
    sa.Column("verified_at", sa.Float),
    sa.Column("format", sa.String),
)

event = sa.Table(
    "event",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("source", sa.String, primary_key=True),
    sa.Column("offset", sa.Integer, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

# How far each file of a run has been read, in bytes.
source = sa.Table(
    "source",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("offset", sa.Integer, nullable=False),
)

# What a run that has not ended is built from (``model/run/fold.py``), so that the next reading only adds what is new.
# If a run that has ended starts again, its events are read again instead.
builder = sa.Table(
    "builder",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("facts", sa.JSON, nullable=False),
)

progress = sa.Table(
    "progress",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("attempt_key", sa.String, primary_key=True),
    sa.Column("last_step", sa.Integer),
    sa.Column("last_time", sa.Float),
    sa.Column("metrics", sa.JSON, nullable=False),
)

# Lines of journals that are not records, kept for inspection.
garbage = sa.Table(
    "garbage",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("source", sa.String, primary_key=True),
    sa.Column("offset", sa.Integer, primary_key=True),
    sa.Column("line", sa.LargeBinary, nullable=False),
    sa.Column("why", sa.String, nullable=False),
)

# How much of a run has been sent to the tracking store: ``offsets`` by metrics file, and the run's ``revision`` at that
# time. This is not in the run directories, so the table survives a change of the version.
mirror = sa.Table(
    "mirror",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("uri", sa.String, nullable=False),
    sa.Column("offsets", sa.JSON, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
)


def is_json(column: sa.Column[Any]) -> bool:
    """Whether a column holds JSON."""
    return isinstance(column.type, sa.JSON)
