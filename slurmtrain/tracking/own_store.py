"""The address of an MLflow store in an SQLite file, as SQLAlchemy reads it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from slurmtrain.system.locks import SQLITE_WITHOUT_LOCKS


def store_address(file: Path, *, locks: bool = True) -> str:
    """The URL by which MLflow opens the store in a file, whose path may have any characters.

    Args:
        file: The SQLite file.
        locks: Whether its file system has locks; otherwise the store is opened without.
    """
    from sqlalchemy import URL

    # Versions of SQLAlchemy decode different parts of a URL: each reads the URLs that it has written itself.
    if locks:
        url = URL.create("sqlite", database=str(file))
    else:
        query = {"vfs": SQLITE_WITHOUT_LOCKS, "uri": "true"}
        url = URL.create("sqlite", database=f"file:{quote(str(file))}", query=query)
    return url.render_as_string(hide_password=False)
