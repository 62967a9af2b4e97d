"""What is known of interruptions in a partition, and of what saves cost, when a run is about to go there."""

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
    """What attempts have seen where a run is to go, and what its own last save, or one of its namesakes', has cost."""

    lived: Sequence[AttemptSpan] = ()
    stall_s: float | None = None
    save_s: float | None = None
    own: bool = False


def partition_history(
    connection: sa.Connection, run_id: str, name: str, executor: str, partition: str, since: float
) -> PartitionHistory:
    """What is known of interruptions in a partition, and of the saves of a run, or of its namesakes.

    Of attempts that are not over, the time counts up to the last of their metrics.

    Args:
        connection: Where to ask.
        run_id: The run.
        name: Its name.
        executor: ``slurm`` or ``local``.
        partition: As ``submitting`` events have it; empty for all.
        since: Attempts that began earlier do not count, in seconds since 1970.
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


# Of so many runs of a name, the newest, the last save is looked for.
_NAMESAKES = 20


def _attempts_since(executor: str, partition: str, since: float) -> sa.Select[Any]:
    """Attempts that began since then: ``started_at``, ``until``, ``nodes``, ``cause``, and ``failures`` of crashes."""
    attempt, run, progress, event = schema.attempt, schema.run, schema.progress, schema.event
    nodes = sa.select(sa.func.count()).select_from(sa.func.json_each(attempt.c.hosts).table_valued("key"))
    key = attempt.c.job_id + "." + sa.cast(attempt.c.restart, sa.String)
    of_attempt = sa.and_(progress.c.run_id == attempt.c.run_id, progress.c.attempt_key == key)
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
        .outerjoin(progress, of_attempt)
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
