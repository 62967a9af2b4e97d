"""Files that are as they were or as they were meant to be."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.simulated_run import make_test_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmtrain.errors import CheckpointError, PathError, RunUnreadable
from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest, read_manifest
from slurmtrain.runtime.environment.node import Launch, read_launch, read_plan
from slurmtrain.runtime.job import lease
from slurmtrain.system import files
from slurmtrain.system.files import file_identity, load_answer, read_json, store_answer
from slurmtrain.system.journal_files import journal_files, read_pieces
from slurmtrain.system.owned_files import open_readable


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def _open_umask() -> object:
    """Private must not depend on the umask."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_open_umask")
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


@pytest.mark.usefixtures("_open_umask")
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


@pytest.mark.usefixtures("_open_umask")
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
    with pytest.raises(PathError, match=r"f\.json has changed since slurmtrain wrote it"):
        files.read_json(path)


@pytest.mark.usefixtures("_open_umask")
def test_a_file_is_made_private_and_keeps_its_content_when_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.create_private(path)
    assert mode(path) == 0o600
    path.write_text("kept")
    files.create_private(path)
    assert path.read_text() == "kept"


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


@pytest.mark.usefixtures("_open_umask")
def test_a_new_file_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    files.write_new(tmp_path / "a", b"x")
    assert mode(tmp_path / "a") == 0o600
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "a", b"y")
    assert (tmp_path / "a").read_bytes() == b"x"


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
def test_a_damaged_answer_is_as_none(file: Path, content: bytes) -> None:
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


ODD = (
    "null", "[]", "5", "{}", "not json", "", '"\\ud800"', "1e400", "NaN", "9" * 5000, "[" * 100_000,
    '{"a":' * 200 + "1" + "}" * 200,
)  # fmt: skip
MANIFEST_OF_5 = Manifest(
    step=5, world_size=1, saved_at=1.0, seconds=1.0, stall_s=0.0, plan_hash="", attempt="j.0", why="steps", files={}
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "0123456789")
    for folder in (directory.journals, directory.submission(1).path, directory.checkpoints / "step-5"):
        folder.mkdir(parents=True)
    return directory


READERS: dict[str, tuple[Callable[[RunDir], Path], Callable[[RunDir], object], str]] = {
    "plan": (lambda run: run.plan, lambda run: read_plan(run.plan), json.dumps(make_test_plan().to_json())),
    "launch": (
        lambda run: run.submission(1).launch,
        lambda run: read_launch(run.submission(1)),
        json.dumps(Launch(attempt=1).to_dict()),
    ),
    "lease": (lambda run: run.lease, lambda run: lease.granted_to(run), '{"submission": 1, "attempt": "j.0"}'),
    "manifest": (
        lambda run: run.checkpoints / "step-5" / MANIFEST,
        lambda run: read_manifest(run.checkpoints / "step-5"),
        json.dumps(MANIFEST_OF_5.to_json()),
    ),
}
EVERY_FILE = pytest.mark.parametrize("name", sorted(READERS))


@EVERY_FILE
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_odd_value_of_any_key_is_read_or_an_error_in_a_sentence(run: RunDir, name: str, data: st.DataObject) -> None:
    place, read, content = READERS[name]
    texts = {key: json.dumps(value) for key, value in json.loads(content).items()}
    texts[data.draw(st.sampled_from(sorted(texts)))] = data.draw(st.sampled_from(ODD))
    record = "{" + ",".join(f'"{key}": {text}' for key, text in texts.items()) + "}"
    place(run).write_text(data.draw(st.sampled_from([record, record, data.draw(st.sampled_from(ODD))])))
    with contextlib.suppress(PathError, CheckpointError):
        read(run)


@EVERY_FILE
def test_a_fifo_instead_of_a_file_is_an_error_and_nothing_waits_for_it(run: RunDir, name: str) -> None:
    place, read, _ = READERS[name]
    os.mkfifo(place(run))
    with pytest.raises((PathError, CheckpointError), match="is a FIFO, not a regular file"):
        read(run)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_log_that_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rank-0.log"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        open_readable(path)


def test_an_error_in_a_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{\n "a": 1,\n "b" 2}')
    with pytest.raises(PathError, match=r"plan\.json has changed since slurmtrain wrote it \(.*line 3 column 6"):
        read_json(path)


def test_a_line_of_a_hundred_megabytes_is_skipped_in_pieces_and_the_next_is_read(run: RunDir) -> None:
    journal = run.journals / "submit.jsonl"
    with journal.open("wb") as file:
        file.truncate(100 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"t": 1, "kind": "created"}\n')
    readings = [piece.reading for file in journal_files(run) for piece in read_pieces(file)]
    assert [record["kind"] for reading in readings for _, record in reading.records] == ["created"]
    garbage = [bad for reading in readings for bad in reading.garbage]
    assert all(len(bad.line) <= 1024 for bad in garbage)
    assert garbage[0].why == "it is longer than 16777216 bytes"


def test_a_journal_that_is_no_file_is_an_error_unless_problems_are_collected(run: RunDir) -> None:
    (run.journals / "x.jsonl").mkdir()
    (run.journals / "good.jsonl").write_bytes(b"")
    with pytest.raises(RunUnreadable, match=r"journal/x\.jsonl is a directory"):
        journal_files(run)
    problems: list[str] = []
    assert [file.name for file in journal_files(run, problems)] == ["journal/good.jsonl"]
    assert problems == ["journal/x.jsonl is a directory, not a regular file"]
