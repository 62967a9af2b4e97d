"""Answers in the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmtrain.system.user_cache import file_identity, load_answer, store_answer


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the answer ``x``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/slurmtrain/x.json"


def test_an_answer_is_kept_for_its_key_alone_and_for_its_owner_alone(file: Path) -> None:
    assert load_answer("x", ["a"]) is None
    store_answer("x", ["a"], {"b": 1})
    assert (load_answer("x", ["a"]), load_answer("x", ["b"]), load_answer("y", ["a"])) == ({"b": 1}, None, None)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"key": 1}', b"{}"])
def test_a_damaged_file_is_as_none(file: Path, content: bytes) -> None:
    store_answer("x", "k", 1)
    file.write_bytes(content)
    assert load_answer("x", "k") is None
    store_answer("x", "k", 2)
    assert load_answer("x", "k") == 2


def test_a_file_that_others_can_write_to_is_not_read(file: Path) -> None:
    store_answer("x", "k", 1)
    file.chmod(0o666)
    assert load_answer("x", "k") is None


@pytest.mark.parametrize("place", ["/dev/null", "relative"])
def test_where_nothing_can_be_kept_nothing_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.chdir(tmp_path)
    store_answer("x", "k", 1)
    assert load_answer("x", "k") is None
    assert list(tmp_path.iterdir()) == []


def test_the_identity_of_a_path_changes_with_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    identities = [file_identity(str(path))]
    for content in ("b", "cd"):
        path.write_text(content)
        identities.append(file_identity(str(path)))
    os.utime(path, (1, 1))
    identities.append(file_identity(str(path)))
    assert len({str(each) for each in identities}) == 4
