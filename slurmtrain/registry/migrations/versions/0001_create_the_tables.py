"""Create the tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "attempt",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("cause", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("submitted_at", sa.Float(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("lost_steps", sa.Integer(), nullable=True),
        sa.Column("master_addr", sa.String(), nullable=True),
        sa.Column("master_port", sa.Integer(), nullable=True),
        sa.Column("interfaces", sa.JSON(), nullable=False),
        sa.Column("network", sa.JSON(), nullable=False),
        sa.Column("clock", sa.JSON(), nullable=False),
        sa.Column("checks", sa.JSON(), nullable=False),
        sa.Column("failures", sa.JSON(), nullable=False),
        sa.Column("overrides", sa.JSON(), nullable=False),
        sa.Column("from_start", sa.Boolean(), nullable=False),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("handed_over", sa.Boolean(), nullable=False),
        sa.Column("submission", sa.Integer(), nullable=False),
        sa.Column("submitted_from", sa.String(), nullable=True),
        sa.Column("absent_since", sa.Float(), nullable=True),
        sa.Column("confirmed", sa.Boolean(), nullable=False),
        sa.Column("without", sa.JSON(), nullable=False),
        sa.Column("excluded", sa.JSON(), nullable=False),
        sa.Column("restarted_by", sa.String(), nullable=True),
        sa.Column("requeue_problem", sa.String(), nullable=False),
        sa.Column("interval", sa.JSON(), nullable=False),
        sa.Column("save_problem", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("saved_at", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("stall_s", sa.Float(), nullable=True),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("pruned_at", sa.Float(), nullable=True),
        sa.Column("verified_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "path", "saved_at"),
    )
    op.create_table(
        "event",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("offset", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "source", "offset"),
    )
    op.create_table(
        "garbage",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("offset", sa.Integer(), nullable=False),
        sa.Column("line", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "source", "offset"),
    )
    op.create_table(
        "ledger",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("attempt_key", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("checks", sa.JSON(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt_key", "host"),
    )
    op.create_table(
        "mirror",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("offsets", sa.JSON(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "progress",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("attempt_key", sa.String(), nullable=False),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("last_time", sa.Float(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt_key"),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("executor", sa.String(), nullable=False),
        sa.Column("plan_hash", sa.String(), nullable=True),
        sa.Column("submitted_at", sa.Float(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("lost_steps", sa.Integer(), nullable=True),
        sa.Column("mlflow_run_id", sa.String(), nullable=True),
        sa.Column("git", sa.JSON(), nullable=True),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("save_problem", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.JSON(), nullable=True),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("journals_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts_at", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_run_name"), "run", ["name"], unique=False)
    op.create_table(
        "source",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("offset", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "path"),
    )
