"""Files that are as they were or as they were meant to be."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PathError
from slurmtrain.system import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _open_umask() -> object:
    """Private must not depend on the umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_directory_is_made_private_and_making_it_again_is_fine(tmp_path: Path) -> None:
    path = files.make_directory(tmp_path / "a" / "b")
    assert mode(path) == 0o700
    assert files.make_directory(path) == path
    (tmp_path / "file").write_text("")
    with pytest.raises(PathError, match=r"cannot create the directory .*file/sub: not a directory"):
        files.make_directory(tmp_path / "file" / "sub")


@pytest.mark.parametrize("broken", ["fsync", "write"])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "f"
    files.write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_durable_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    files.write_atomically(tmp_path / "f", b"x")
    assert calls == ["file", "rename", "directory"]
    assert (mode(tmp_path / "f"), list(tmp_path.iterdir())) == (0o600, [tmp_path / "f"])
    files.write_atomically(tmp_path / "f", b"another")
    assert (tmp_path / "f").read_bytes() == b"another"


def test_json_reads_back_as_it_was_written(tmp_path: Path) -> None:
    data = {"a": [1, None, "ü"], "b": {"c": 0.5}}
    files.write_json(tmp_path / "f.json", data)
    assert files.read_json(tmp_path / "f.json") == data
    assert mode(tmp_path / "f.json") == 0o600
    assert files.read_json(tmp_path / "none.json") is None
    with pytest.raises(PathError, match="is a directory, not a regular file"):
        files.read_json(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_file_that_is_not_our_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(PathError, match=r"f\.json is not the JSON that slurmtrain wrote there"):
        files.read_json(path)


def test_a_file_is_made_private_and_keeps_its_content_when_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.create_private(path)
    assert mode(path) == 0o600
    path.write_text("kept")
    files.create_private(path)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "whatever"), "no space left on the device"),
        (PermissionError(errno.EACCES, "Permission denied"), "permission denied"),
        (OSError("odd"), "odd"),
    ],
)
def test_an_os_error_is_described(error: OSError, words: str) -> None:
    assert files.describe_os_error(error) == words


def test_files_that_are_made_durable_together_cost_no_fsync_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(handle), fsync(handle)))
    with files.durable_together(tmp_path):
        files.write_json(tmp_path / "a.json", {"a": 1})
    assert (files.read_json(tmp_path / "a.json"), calls) == ({"a": 1}, [])
    with pytest.raises(ZeroDivisionError), files.durable_together(tmp_path):
        raise ZeroDivisionError
    files.write_json(tmp_path / "a.json", {"a": 2})
    assert len(calls) == 2


_JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON))
def test_json_for_files_is_json(data: dict[str, Any]) -> None:
    assert json.loads(files.json_bytes(data)) == data


def test_json_for_files_has_a_line_for_each_key_of_two_levels() -> None:
    assert files.json_bytes({"a": 1, "b": {"c": {"d": [1]}, "e": 2}, "f": {}}).decode().splitlines() == [
        "{", ' "a": 1,', ' "b": {', '  "c": {"d": [1]},', '  "e": 2', " },", ' "f": {}', "}"
    ]  # fmt: skip


def test_a_new_file_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    files.write_new(tmp_path / "a", b"x")
    assert mode(tmp_path / "a") == 0o600
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "a", b"y")
    assert (tmp_path / "a").read_bytes() == b"x"
