"""A glance at the registry without SQLAlchemy, whose import takes longer than a person waits for the Tab key.

Nothing is written or repaired, and nothing raised: a registry that is missing, damaged, locked or of another version,
or whose server does not answer at once, shows what can be read of it, maybe nothing.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from slurmtrain.model.urls import DatabaseUrl

_PATIENCE_S = 0.2
# A server that is near answers in a tenth of this.
_SERVER_PATIENCE_S = 0.5
# More than anybody chooses from.
_MOST = 2000


class Glimpse(NamedTuple):
    """The names of a run, and the names of its tags, parameters and metrics."""

    id: str
    name: str
    state: str
    sweep: str | None = None
    tags: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


def glance(registry: Path | DatabaseUrl) -> list[Glimpse]:
    """The newest runs of a registry, newest first."""
    columns = ", ".join(Glimpse._fields)
    query = f"SELECT {columns} FROM run ORDER BY id DESC LIMIT {_MOST}"  # noqa: S608
    with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
        if isinstance(registry, Path):
            uri = f"file:{quote(str(registry))}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S)) as connection:
                rows = connection.execute(query).fetchall()
        else:
            rows = _ask_server(registry, query)
        # Of a JSON array its texts, of an object its keys.
        return [Glimpse(*row[:4], *(tuple(map(str, json.loads(each or "[]"))) for each in row[4:])) for row in rows]
    return []


def _ask_server(registry: DatabaseUrl, query: str) -> list[Any]:
    """The rows if the server answers in time. Only a thread ends the wait for one that hangs."""
    rows: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            import psycopg

            options = f"{registry.options} -csearch_path={registry.schema}"
            with psycopg.connect(registry.text, options=options, connect_timeout=2) as connection:
                rows.extend(connection.execute(query).fetchall())

    # The process does not wait for a daemon thread when it ends.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SERVER_PATIENCE_S)
    return [] if thread.is_alive() else rows
