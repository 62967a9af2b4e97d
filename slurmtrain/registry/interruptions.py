"""What is known about interruptions in a partition, and about the cost of saves, before a run starts there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from slurmtrain.model.interruption.statistics import AttemptSpan
from slurmtrain.registry import schema


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
    attempts = connection.execute(_attempts_since(executor, partition, since)).all()
    save = connection.execute(_last_save(run_id, name, executor)).one_or_none()
    lived = [
        AttemptSpan(max(0.0, row.until - row.started_at) * row.nodes, row.cause, json.loads(row.failures or "[]"))
        for row in attempts
    ]
    if save is None:
        return PartitionHistory(lived)
    return PartitionHistory(lived, save.stall_s, save.seconds, save.run_id == run_id)


# The last save is looked for in at most this many runs of the same name, the newest ones.
_NAMESAKES = 20


def _attempts_since(executor: str, partition: str, since: float) -> sa.Select[Any]:
    """Attempts from ``since`` on: ``started_at``, ``until``, ``nodes``, ``cause``; ``failures`` of crashes."""
    attempt, run, progress, event = schema.attempt, schema.run, schema.progress, schema.event
    key = attempt.c.job_id + "." + sa.cast(attempt.c.restart, sa.String)
    of_attempt = sa.and_(progress.c.run_id == attempt.c.run_id, progress.c.attempt_key == key)
    failures = sa.case((attempt.c.cause == "crash", attempt.c.failures))
    until = sa.func.coalesce(attempt.c.ended_at, progress.c.last_time, attempt.c.started_at)
    query = (
        sa.select(
            attempt.c.started_at,
            until.label("until"),
            sa.func.keys_in(attempt.c.hosts).label("nodes"),
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
