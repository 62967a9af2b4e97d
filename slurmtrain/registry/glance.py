"""A glance at the registry without SQLAlchemy, whose import takes longer than a person waits for the Tab key.

Nothing is written or repaired, and nothing raised: a registry that is missing, damaged, locked or of another version
shows what can be read of it, maybe nothing.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

_PATIENCE_S = 0.2
# More than anybody chooses from.
_MOST = 2000


class Glimpse(NamedTuple):
    """What names a run, and what it has names for."""

    id: str
    name: str
    state: str
    sweep: str | None = None
    tags: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


def glance(registry: Path) -> list[Glimpse]:
    """The newest runs of a registry, newest first."""
    columns = ", ".join(Glimpse._fields)
    with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
        uri = f"file:{quote(str(registry))}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S)) as connection:
            rows = connection.execute(f"SELECT {columns} FROM run ORDER BY id DESC LIMIT {_MOST}").fetchall()  # noqa: S608
        return [
            Glimpse(run_id, name, state, sweep, _names(tags), _names(params), _names(metrics))
            for run_id, name, state, sweep, tags, params, metrics in rows
        ]
    return []


def _names(text: Any) -> tuple[str, ...]:
    """The texts in a JSON array, or the keys of a JSON object."""
    return tuple(map(str, json.loads(text or "[]")))
