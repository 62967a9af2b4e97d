"""Where the SQL of SQLite and of PostgreSQL differs: types of columns, inserts, and looking into JSON.

Everything else that this package asks of a database is the same statement for both. What is a matter of files, servers
and connections is in :mod:`slurmtrain.registry.sqlite` and :mod:`slurmtrain.registry.postgresql`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

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
def insert(dialect: str, conflict: Conflict, table: sa.Table, columns: tuple[str, ...]) -> str:
    """An INSERT in the driver's own SQL, to be executed with tuples of the values of ``columns``.

    SQLAlchemy's takes dicts, whose making and ordering would take longer than SQLite itself.

    Args:
        dialect: ``sqlite`` or ``postgresql``.
        conflict: What becomes of an existing row with the same key.
        table: The table.
        columns: Its columns, in the order of the values; others are NULL, or keep their values.
    """
    names = [f'"{name}"' for name in columns]
    places = ", ".join([_PLACEHOLDERS[dialect]] * len(columns))
    # Safe, since every name comes from the schema.
    statement = f'INSERT INTO "{table.name}" ({", ".join(names)}) VALUES ({places})'  # noqa: S608
    if conflict == "fail":
        return statement
    keys = [f'"{column.name}"' for column in table.primary_key]
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    if conflict == "ignore" or not changes:
        return f"{statement} ON CONFLICT DO NOTHING"
    return f"{statement} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}"


class texts_in(GenericFunction[str]):  # noqa: N801 (used like a function)
    """The texts in a JSON array, one in each row of the column ``value``."""

    inherit_cache = True


class keys_in(GenericFunction[int]):  # noqa: N801
    """The number of keys of a JSON object."""

    type = sa.BigInteger()
    inherit_cache = True


class text_at(GenericFunction[str]):  # noqa: N801
    """The value of a key of a JSON object, as text; NULL if it has no such key."""

    type = sa.String()
    inherit_cache = True


@compiles(Text, "postgresql")
def _text_of_postgresql(_type: Text, _compiler: Any, **_options: Any) -> str:
    return 'VARCHAR COLLATE "C"'


@compiles(texts_in, "sqlite")
def _texts_in_sqlite(function: texts_in, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each({compiler.process(function.clauses, **options)})"


@compiles(texts_in, "postgresql")
def _texts_in_postgresql(function: texts_in, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_array_elements_text(CAST({compiler.process(function.clauses, **options)} AS json))"


@compiles(keys_in, "sqlite")
def _keys_in_sqlite(function: keys_in, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT count(*) FROM json_each({compiler.process(function.clauses, **options)}))"  # noqa: S608


@compiles(keys_in, "postgresql")
def _keys_in_postgresql(function: keys_in, compiler: SQLCompiler, **options: Any) -> str:
    document = compiler.process(function.clauses, **options)
    return f"(SELECT count(*) FROM json_object_keys(CAST({document} AS json)))"  # noqa: S608


@compiles(text_at, "sqlite")
def _text_in_sqlite(function: text_at, compiler: SQLCompiler, **options: Any) -> str:
    document, key = function.clauses.clauses
    path = compiler.process(sa.literal("$.") + key, **options)
    return f"CAST(json_extract({compiler.process(document, **options)}, {path}) AS VARCHAR)"


@compiles(text_at, "postgresql")
def _text_in_postgresql(function: text_at, compiler: SQLCompiler, **options: Any) -> str:
    document, key = (compiler.process(clause, **options) for clause in function.clauses.clauses)
    return f"CAST({document} AS json) ->> {key}"
