"""Files that are damaged in many ways: commands repair what was a registry, and leave alone what was not."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.damaged_registry import IDS, Root

PAGE = 4096
CASES = int(os.environ.get("TEST_DAMAGE_CASES", "6"))


def overwrite(path: Path, content: bytes, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def root_page(path: Path, name: str) -> int:
    """Where the first page of a table or an index begins, in bytes."""
    with sqlite3.connect(path) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,))
    return (int(page) - 1) * PAGE


def truncated(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no last page": truncated(lambda size: size - PAGE),
    "half of its pages": truncated(lambda size: size // PAGE // 2 * PAGE),
    "its first page only": truncated(lambda _: PAGE),
    "half of its last page": truncated(lambda size: size - PAGE // 2),
    "half of its header": truncated(lambda _: 50),
    "a few bytes": truncated(lambda _: 3),
    "no header": lambda path: overwrite(path, bytes(100)),
    "garbage for a header": lambda path: overwrite(path, random.Random(1).randbytes(100)),
    "no first page": lambda path: overwrite(path, bytes(PAGE)),
    "a text": lambda path: path.write_bytes(b"these are my notes " * 1000),
    "no table of attempts": lambda path: overwrite(path, bytes(PAGE), root_page(path, "attempt")),
    "garbage for the table of runs": lambda path: overwrite(
        path, random.Random(2).randbytes(PAGE), root_page(path, "run")
    ),
    "garbage for an index": lambda path: overwrite(
        path, random.Random(3).randbytes(PAGE), root_page(path, "run_state")
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_put_aside_and_replaced_and_that_is_reported_once(root: Root, kind: str) -> None:
    before, _ = root.status()
    DAMAGE[kind](root.registry)
    damaged = root.registry.read_bytes()
    after, errors = root.status()
    assert after == before
    # Nothing that status asks for may be on the damaged page.
    repaired = "" if errors else str(root.repair())
    [line] = (errors or repaired).splitlines()
    assert f"the registry {root.registry} was damaged" in line
    assert f"read anew from {len(IDS)} run directories; the damaged file is kept as {root.registry}.damaged" in line
    assert (root.runs / "registry.db.damaged").read_bytes() == damaged
    assert root.beside == ["registry.db", "registry.db.damaged"]
    assert root.check() == []
    assert root.status() == (before, "")
    assert root.registry.stat().st_mode & 0o777 == 0o600
    assert ("may be sent again" in line) == (root.sent() != IDS)


@pytest.mark.parametrize("case", range(CASES))
def test_random_bytes_anywhere_change_no_answer(root: Root, case: int) -> None:
    chance = random.Random(case)
    before, _ = root.status()
    pages = root.registry.stat().st_size // PAGE
    for _ in range(chance.randint(1, 4)):
        page, begin = chance.randrange(pages), chance.randrange(PAGE // 2)
        overwrite(root.registry, chance.randbytes(PAGE - begin), page * PAGE + begin)
    assert root.status()[0] == before
    root.repair()
    assert root.check() == []
    assert root.status() == (before, "")
    assert root.beside in (["registry.db"], ["registry.db", "registry.db.damaged"])


def test_an_empty_file_is_filled(root: Root) -> None:
    before, _ = root.status()
    root.registry.write_bytes(b"")
    assert root.status() == (before, "")
    assert root.check() == []
    assert root.beside == ["registry.db"]


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))
    overwrite(path.with_name("elsewhere.db"), bytes(100))
    path.symlink_to("elsewhere.db")


def make_other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")


def make_other_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 42")
    os.truncate(path, path.stat().st_size - PAGE)


def make_damaged_other_database(path: Path) -> None:
    make_other_database(path)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE more (text)")
    os.truncate(path, path.stat().st_size - PAGE)


def make_text_where_none_was(path: Path) -> None:
    path.write_bytes(b"these are my notes " * 1000)
    path.with_name(".registry.db.lock").unlink()


@pytest.mark.parametrize(
    "make",
    [
        make_directory,
        make_pipe,
        make_link,
        make_other_database,
        make_other_application,
        make_damaged_other_database,
        make_text_where_none_was,
    ],
)
def test_what_is_no_registry_is_left_alone_and_the_runs_are_read(root: Root, make: Callable[[Path], None]) -> None:
    before, _ = root.status()
    make(root.registry)
    beside, status = root.beside, root.registry.lstat()
    for _ in range(2):
        after, errors = root.status()
        assert [run["state"] for run in after] == [run["state"] for run in before]
        assert "meanwhile the run directories are read instead" in errors
    assert root.beside == beside
    assert (root.registry.lstat().st_ino, root.registry.lstat().st_mtime) == (status.st_ino, status.st_mtime)
