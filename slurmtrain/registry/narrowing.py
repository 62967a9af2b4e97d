"""Which runs may meet conditions, or have the best values, without reading them: reading a run takes far longer.

The parts of a condition that mean the same to the database are translated, and the other parts are taken to hold. The
condition itself judges the remaining runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from slurmtrain.model.run.events.base import is_text
from slurmtrain.model.run.run import ENDED
from slurmtrain.registry import schema
from slurmtrain.registry.queries import fetch, is_deleted

if TYPE_CHECKING:
    from slurmtrain.model.query.conditions import Comparison, Condition
    from slurmtrain.model.query.measures import Measure

Clause = sa.ColumnElement[bool]

_TEXTS = frozenset({"id", "name", "state", "executor", "cause", "sweep", "job_id"})
_NUMBERS = frozenset({"step", "total_steps", "attempt", "lost_steps"})
_TIMES = frozenset({"submitted_at", "started_at", "ended_at", "deleted_at"})
_SECTIONS = frozenset({"params", "metrics"})
# In front of a key that needs no escape in a path of JSON, and that is no path in itself.
_KEY = re.compile(r"[A-Za-z0-9_/-]+")
# Times are shown, and so compared, without what is below a millisecond.
_SLACK_S = 0.01


def candidates(connection: sa.Connection, conditions: Sequence[Condition], *, put_away: bool) -> list[str]:
    """The ids of the runs that may meet all conditions, oldest first.

    Args:
        connection: The connection to query.
        conditions: The conditions.
        put_away: Whether archived and deleted runs that have ended are among them.
    """
    # PostgreSQL fails at a JSON document with NaN, for the whole query.
    json = connection.dialect.name == "sqlite"
    hidden = (schema.run.c.archived | is_deleted()) & schema.run.c.state.in_(sorted(ENDED))
    clauses = [] if put_away else [~hidden]
    clauses += [clause for each in conditions if (clause := _may_hold(each, json=json)) is not None]
    query = sa.select(schema.run.c.id).where(*clauses)
    return [row[0] for row in fetch(connection, query.order_by(schema.run.c.id))]


def best_candidates(connection: sa.Connection, measure: Measure, *, larger: bool, limit: int) -> tuple[list[str], int]:
    """The ids of the runs with the best values of a measure, and how many runs have none; without archived ones.

    Args:
        connection: The connection to query.
        measure: A measure that a summary has.
        larger: Whether larger values are better.
        limit: How many runs, at most.
    """
    run, table = schema.run.c, schema.metric
    is_put_away = run.archived & run.state.in_(sorted(ENDED))
    put_away = sa.select(run.id).where(is_put_away)
    value = table.c[measure.kind]
    has_value = (table.c.name == measure.metric) & value.is_not(None)
    best = sa.select(table.c.run_id).where(has_value, table.c.run_id.not_in(put_away))
    ids = fetch(connection, best.order_by(value.desc() if larger else value.asc(), table.c.run_id).limit(limit))
    # Few runs are put away: counting all others would take reading them.
    counts = [
        sa.select(sa.func.count()).select_from(schema.run),
        sa.select(sa.func.count()).where(is_put_away),
        sa.select(sa.func.count()).where(has_value),
        sa.select(sa.func.count()).where(has_value, table.c.run_id.in_(put_away)),
    ]
    runs, hidden, valued, hidden_valued = (int(connection.execute(count).scalar() or 0) for count in counts)
    return sorted(row[0] for row in ids), (runs - hidden) - (valued - hidden_valued)


def _may_hold(condition: Condition, *, json: bool) -> Clause | None:
    """A clause that is true of every run that meets a condition; None: nothing that SQL could tell."""
    from slurmtrain.model.query.conditions import Comparison

    if isinstance(condition, Comparison):
        return _comparison(condition, json=json)
    clauses = [_may_hold(part, json=json) for part in condition.parts]
    translated = [clause for clause in clauses if clause is not None]
    if condition.operator == "and" and translated:
        return sa.and_(*translated)
    return sa.or_(*translated) if condition.operator == "or" and len(translated) == len(clauses) else None


def _comparison(comparison: Comparison, *, json: bool) -> Clause | None:
    from slurmtrain.model.query.measures import read_measure

    name, literals = comparison.name, comparison.literals
    if any(literal.is_null for literal in literals):
        return None
    if name in _TEXTS and comparison.operator in ("=", "in"):
        texts = [literal.text for literal in literals if literal.is_text and is_text(literal.text)]
        # A value that no database takes as text is in no run either, but the condition itself has to say so.
        return schema.run.c[name].in_(texts) if len(texts) == len(literals) else None
    if not comparison.is_order:
        return None
    if name in _TIMES:
        span, column = literals[0].span, schema.run.c[name]
        if span is None:
            return None
        is_after = comparison.operator[0] == ">"
        return column >= span.begin - _SLACK_S if is_after else column <= span.end + _SLACK_S
    section, _, key = name.partition(".")
    number = literals[0].number
    # Python compares whole numbers of any length, databases do not.
    if number is None or not -(2**53) < number < 2**53:
        return None
    if name in _NUMBERS:
        return _order_clause(schema.run.c[name], comparison.operator, number)
    if (measure := read_measure(name)) is not None and measure.is_summarised and is_text(measure.metric):
        table = schema.metric.c
        holds = _order_clause(table[measure.kind], comparison.operator, float(number))
        return schema.run.c.id.in_(sa.select(table.run_id).where(table.name == measure.metric, holds))
    if json and section in _SECTIONS and _KEY.fullmatch(key):
        # A text if it is no number, or if the document is not JSON to SQLite.
        document = schema.run.c[section]
        value: sa.ColumnElement[float] = sa.case(
            (sa.func.json_valid(document) == 1, sa.func.json_extract(document, f'$."{key}"', type_=sa.Float())),
            else_=sa.literal_column("'?'", sa.Float()),
        )
        return sa.or_(_order_clause(value, comparison.operator, float(number)), sa.func.typeof(value) == "text")
    return None


def _order_clause(value: sa.ColumnElement[Any], relation: str, number: float) -> Clause:
    from slurmtrain.model.query.conditions import ORDERS

    compare: Callable[[Any, Any], Any] = ORDERS[relation]
    clause: Clause = compare(value, number)
    return clause
