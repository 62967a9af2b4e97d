"""The tables, made from the fields of their records, and their version; where the SQL of SQLite and PostgreSQL differs.

Everything that this package asks of a database is the same statement for both, except for types of columns, inserts,
and looking into JSON, which are here. What is a matter of files, servers and connections is in
:mod:`slurmtrain.registry.sqlite` and :mod:`slurmtrain.plugins.postgresql`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

from slurmtrain.model.run.journal_lines import Garbage, Progress
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.registry.cells import Sent

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Conflict = Literal["fail", "ignore", "replace"]
"""What becomes of a new row whose key exists: an error, nothing, or it replaces the old row's values."""

_PLACEHOLDERS = {"sqlite": "?", "postgresql": "%s"}


class Text(sa.String):
    """A column with text, which is compared byte by byte.

    PostgreSQL would compare by the rules of a language, which pass over "/" and "-". A collation of SQLAlchemy's type
    would be repeated at every value, which PostgreSQL refuses in some places (BETWEEN).
    """


TEXT = Text()


class Json(sa.String):
    """A column with JSON as text, which is decoded only when it is needed.

    It is no JSON type of a database: PostgreSQL refuses lines with NaN, and its driver would decode every value.
    """


@cache
def insert(dialect: str, conflict: Conflict, table: sa.Table, columns: tuple[str, ...] = ()) -> str:
    """An INSERT in the driver's own SQL, to be executed with tuples of the values of ``columns``.

    SQLAlchemy's takes dicts, whose making and ordering would take longer than SQLite itself.

    Args:
        dialect: ``sqlite`` or ``postgresql``.
        conflict: What becomes of an existing row with the same key.
        table: The table.
        columns: Its columns, in the order of the values; others are NULL, or keep their values. By default all.
    """
    names = [f'"{name}"' for name in columns or table.columns.keys()]
    places = ", ".join([_PLACEHOLDERS[dialect]] * len(names))
    # Safe, since every name comes from the schema.
    statement = f'INSERT INTO "{table.name}" ({", ".join(names)}) VALUES ({places})'  # noqa: S608
    if conflict == "fail":
        return statement
    keys = [f'"{column.name}"' for column in table.primary_key]
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    if conflict == "ignore" or not changes:
        return f"{statement} ON CONFLICT DO NOTHING"
    return f"{statement} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}"


class json_texts(GenericFunction[str]):  # noqa: N801 (used like a function)
    """The texts in a JSON array, one in each row of the column ``value``."""

    inherit_cache = True


class text_at(GenericFunction[str]):  # noqa: N801
    """The value of a key of a JSON object, as text; NULL if it has no such key."""

    type = sa.String()
    inherit_cache = True


@compiles(Text, "postgresql")
def _(_type: Text, _compiler: Any, **_options: Any) -> str:
    return 'VARCHAR COLLATE "C"'


@compiles(json_texts, "sqlite")
def _(function: json_texts, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each({compiler.process(function.clauses, **options)})"


@compiles(json_texts, "postgresql")
def _(function: json_texts, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_array_elements_text(CAST({compiler.process(function.clauses, **options)} AS json))"


@compiles(text_at, "sqlite")
def _(function: text_at, compiler: SQLCompiler, **options: Any) -> str:
    document, key = function.clauses.clauses
    path = compiler.process(sa.literal("$.") + key, **options)
    return f"CAST(json_extract({compiler.process(document, **options)}, {path}) AS VARCHAR)"


@compiles(text_at, "postgresql")
def _(function: text_at, compiler: SQLCompiler, **options: Any) -> str:
    document, key = (compiler.process(clause, **options) for clause in function.clauses.clauses)
    return f"CAST({document} AS json) ->> {key}"


# Increase this with every change to the tables or to the meaning of their values: a registry of an earlier version is
# rebuilt from the run directories. A test knows the tables of each version.
VERSION = 16

metadata = sa.MetaData()

_TYPES: Mapping[str, Any] = {
    "str": TEXT, "int": sa.BigInteger, "float": sa.Float, "bool": sa.Boolean, "bytes": sa.LargeBinary,
}  # fmt: skip


def stored_fields(record: type[DataclassInstance]) -> dict[str, str]:
    """The fields of a record that have columns, with their annotations; others are in another table, or in none."""
    return {each.name: str(each.type) for each in fields(record) if each.metadata.get("stored", True)}


def _table(name: str, key: str, columns: Mapping[str, str], *indexes: sa.Index) -> sa.Table:
    """A table.

    Args:
        name: Its name.
        key: The columns of its key, which are text unless the others say something else.
        columns: The columns with the types of their values as annotations; JSON for objects and lists.
        indexes: Its indexes.
    """
    keys = key.split()
    types = {**dict.fromkeys(keys, "str"), **columns}
    made = []
    for column, annotation in types.items():
        bare = annotation.removesuffix(" | None")
        kind = _TYPES.get(bare, Json)
        made.append(sa.Column(column, kind, primary_key=column in keys, nullable=bare != annotation))
    return sa.Table(name, metadata, *made, *indexes)


# A list shows the newest attempt and checkpoint of each run, and commands ask whether it has ended for good, when its
# folders (ns) were last seen to change, and how many bytes of its journals and metrics were read: all in one table.
OF_NEWEST = {
    "job_id": "str | None", "attempt": "int", "cause": "str | None", "nodes": "Sequence[str]",
    "checkpoint": "Mapping[str, Any] | None",
    "settled": "bool", "journals_at": "int", "attempts_at": "int", "revision": "int",
}  # fmt: skip
run = _table(
    "run",
    "id",
    {**stored_fields(Run), **OF_NEWEST},
    # For commands that look at few of many runs (:mod:`slurmtrain.registry.queries`).
    *(sa.Index(f"run_{name}", name) for name in ("name", "state", "sweep", "ended_at")),
    sa.Index("run_archived", "archived", "id"),
)
# Not an Index: its option for PostgreSQL would make every command import that dialect, and all of its drivers.
for _dialect, _condition in {"sqlite": "settled = 0", "postgresql": "NOT settled"}.items():
    # The few runs that may change, and the few that come from others.
    for _name, _where in {"run_unsettled": _condition, "run_with_parents": "parents != '[]'"}.items():
        _index = sa.DDL(f"CREATE INDEX {_name} ON run (id) WHERE {_where}")  # type: ignore[no-untyped-call]
        sa.event.listen(run, "after_create", _index.execute_if(dialect=_dialect))
attempt = _table("attempt", "run_id number", stored_fields(Attempt))
# What the time of each attempt was spent on: one row for each kind (``model/run/accounting.py``), including zeros.
attempt_seconds = _table("attempt_seconds", "run_id attempt kind", {"attempt": "int", "seconds": "float"})
# Nodes that failed the preflight of an attempt. Forgiven findings are in separate journals.
ledger = _table(
    "ledger",
    "run_id attempt_key host",
    {"attempt": "int", "checks": "Sequence[str]", "reason": "str", "evidence": "Mapping[str, Any]", "seen_at": "float"},
)
# Every checkpoint, including deleted ones. ``saved_at`` is in the key since a run that starts again reuses paths.
checkpoint = _table("checkpoint", "run_id path saved_at", stored_fields(Checkpoint))
event = _table(
    "event", "run_id source offset", {"offset": "int", "time": "float", "kind": "str", "data": "Mapping[str, Any]"}
)
# How far each file of a run has been read, in bytes.
source = _table("source", "run_id path", {"offset": "int"})
# What a run that has not ended is built from (``model/run/fold.py``), so that the next reading only adds what is new.
# If a run that has ended starts again, its events are read again instead.
builder = _table("builder", "run_id", {"facts": "Mapping[str, Any]"})
progress = _table("progress", "run_id attempt_key", stored_fields(Progress))
# What survives of each metric after rollbacks; ``last`` is NULL if it is not a number.
_SUMMARY = {
    "points": "int", "last_step": "int", "last": "float | None", "min": "float | None", "min_step": "int | None",
    "max": "float | None", "max_step": "int | None",
}  # fmt: skip
metric = _table("metric", "run_id name", _SUMMARY, sa.Index("metric_last", "name", "last", "run_id"))
# What a run's rows in ``metric`` were made of (``model/metrics/curves.py``), so that the next reading adds to them.
line = _table("line", "run_id", {"made_of": "Mapping[str, Any]"})
# Lines of journals that are not records, kept for inspection.
garbage = _table("garbage", "run_id source offset", stored_fields(Garbage))
# How much of a run each tracker has. Directories of runs that earlier versions have sent do not have this, so the table
# survives a change of the version.
sent = _table("sent", "run_id tracker", stored_fields(Sent))


def is_registry(tables: Collection[str]) -> bool:
    """Whether a database with these ``tables`` is a registry, of any version."""
    # Before version 8, another table had what was sent. Names as common as the first two alone prove nothing.
    return {run.name, event.name} <= set(tables) and bool({sent.name, "mirror"} & set(tables))


def is_json(column: sa.Column[Any]) -> bool:
    """Whether a column holds JSON."""
    return isinstance(column.type, Json)


def replace_tables(connection: sa.Connection, present: Collection[str]) -> None:
    """Make the tables, and delete ``present`` ones of an earlier version, except for tables that must survive."""
    for name in set(present) - {sent.name}:
        connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData())))
    metadata.create_all(connection)
