"""What every command needs to know about runs, before it reads any of them: which there are, and which may change.

The queries take milliseconds for a hundred thousand runs, except that for all rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from slurmtrain.model.run.events.values import is_text
from slurmtrain.model.run.ids import RUN_ID
from slurmtrain.model.run.run import ENDED, RUN_STATES, UNREADABLE
from slurmtrain.registry import schema
from slurmtrain.registry.queries import fetch, of_runs

_OPEN = tuple(state for state in RUN_STATES if state not in ENDED)
# Follows every character of an id.
_AFTER = "~"


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

    @property
    def ended(self) -> bool:
        """Whether it has ended; it may still be started again."""
        return self.state in ENDED

    @property
    def unreadable(self) -> bool:
        """Whether its journals cannot be read."""
        return self.state == UNREADABLE

    @property
    def scanned(self) -> tuple[int, int]:
        """Times (ns) of the run's folders when its files were last listed."""
        return (self.journals_at, self.attempts_at)


def all_ids(connection: sa.Connection) -> frozenset[str]:
    """The ids of all runs."""
    # One text from the database is split in a tenth of the time that its driver takes for as many rows.
    text = connection.execute(sa.select(sa.func.aggregate_strings(schema.run.c.id, " "))).scalar()
    return frozenset(str(text or "").split())


def index_rows(connection: sa.Connection, run_ids: Collection[str] | None = None) -> dict[str, IndexRow]:
    """These runs, or all, by id, oldest first."""
    if run_ids is None:
        return _fetch(connection, _rows().order_by(schema.run.c.id))
    if not run_ids:
        return {}
    return _fetch(connection, _rows_of_runs(), {"ids": json.dumps(sorted(run_ids))})


def unsettled(connection: sa.Connection) -> dict[str, IndexRow]:
    """The runs that have not settled, by id."""
    return _fetch(connection, _rows().where(~schema.run.c.settled))


def ended_last(connection: sa.Connection, limit: int) -> dict[str, IndexRow]:
    """The settled runs that ended last, by id; at most ``limit``."""
    last = _rows().where(schema.run.c.settled, schema.run.c.ended_at.is_not(None))
    return _fetch(connection, last.order_by(schema.run.c.ended_at.desc()).limit(limit))


def named(connection: sa.Connection, names: Collection[str]) -> dict[str, IndexRow]:
    """The runs that have one of these ids, names or sweeps, or an id that begins so, oldest first; and the newest."""
    run = schema.run.c
    newest = sa.select(sa.func.max(run.id)).scalar_subquery()
    # Not BETWEEN, beside which PostgreSQL allows no collation.
    begun = [sa.and_(run.id >= name.lower(), run.id <= name.lower() + _AFTER) for name in names if _may_begin_id(name)]
    # No run has a name that is not text, which no database takes.
    listed = [name for name in names if is_text(name)]
    where = sa.or_(run.id == newest, run.name.in_(listed), run.sweep.in_(listed), run.id.in_(listed), *begun)
    return _fetch(connection, _rows().where(where).order_by(run.id))


def worth_listing(connection: sa.Connection, newest: int) -> list[str]:
    """The ids of the runs that have not ended and of the ``newest`` that are not archived, oldest first."""
    run = schema.run.c
    is_open = run.state.in_(_OPEN)
    shown = sa.select(run.id).where(~run.archived).order_by(run.id.desc()).limit(newest)
    ids = {*connection.execute(sa.select(run.id).where(is_open)).scalars(), *connection.execute(shown).scalars()}
    return sorted(ids)


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


def _may_begin_id(name: str) -> bool:
    return bool(name) and RUN_ID.fullmatch((name.lower() + "0" * 10)[:10]) is not None and len(name) <= 10


def _fetch(
    connection: sa.Connection, query: sa.Select[Any], parameters: dict[str, str] | None = None
) -> dict[str, IndexRow]:
    return {row[0]: IndexRow._make(row) for row in fetch(connection, query, parameters)}


@cache
def _rows() -> sa.Select[Any]:
    return sa.select(*(schema.run.c[name] for name in IndexRow._fields))


@cache
def _rows_of_runs() -> sa.Select[Any]:
    return _rows().where(of_runs(schema.run)).order_by(schema.run.c.id)
