"""Published checkpoints: whole or not there."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path

import pytest
import xxhash

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime import checkpointfiles as files
from slurmtrain.runtime.checkpointfiles import Staging

ATTEMPT = "4711.0"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def publish(checkpoints: Path, step: int, content: bytes = b"weights", attempt: str = ATTEMPT) -> Path:
    staging = Staging(checkpoints, attempt, step)
    written = {}
    for name in ("state.pt", "rank-0.pt"):
        with staging.open(name) as file:
            file.write(content)
            file.write(name.encode())
        written[name] = file.result
    path, _ = staging.publish(written, world_size=1, plan_hash="abc", began=time.monotonic())
    return path


def test_a_published_checkpoint_is_complete_and_private(checkpoints: Path) -> None:
    path = publish(checkpoints, 5)
    assert path == checkpoints / "step-5"
    assert sorted(entry.name for entry in path.iterdir()) == ["MANIFEST.json", "rank-0.pt", "state.pt"]
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-5"]
    assert all(stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0 for entry in [path, *path.iterdir()])


def test_a_manifest_says_what_was_written(checkpoints: Path) -> None:
    path = publish(checkpoints, 5, b"12345")
    manifest = files.read_manifest(path)
    assert (manifest.step, manifest.world_size, manifest.plan_hash) == (5, 1, "abc")
    assert manifest.files["state.pt"] == (13, xxhash.xxh3_128(b"12345state.pt").hexdigest())
    assert manifest.bytes == 13 + 14
    described = manifest.describe(path)
    assert (described["step"], described["path"], described["bytes"]) == (5, "checkpoints/step-5", 27)
    files.verify(path, manifest, iter(manifest.files))


def test_until_it_is_published_a_checkpoint_is_not_there(checkpoints: Path) -> None:
    staging = Staging(checkpoints, ATTEMPT, 5)
    with staging.open("state.pt") as file:
        file.write(b"half")
    assert files.published(checkpoints) == []
    assert files.newest_published(checkpoints) is None
    staging.discard()
    assert list(checkpoints.iterdir()) == []


def test_published_checkpoints_come_newest_first_by_number(checkpoints: Path) -> None:
    for step in (9, 100, 10):
        publish(checkpoints, step)
    assert [path.name for path in files.published(checkpoints)] == ["step-100", "step-10", "step-9"]
    assert files.newest_published(checkpoints) == checkpoints / "step-100"


def test_a_directory_without_a_manifest_is_no_checkpoint(checkpoints: Path) -> None:
    publish(checkpoints, 5)
    (checkpoints / "step-9").mkdir()
    (checkpoints / "step-9" / "state.pt").write_bytes(b"x")
    assert [path.name for path in files.published(checkpoints)] == ["step-5"]
    with pytest.raises(CheckpointError, match="was never published"):
        files.read_manifest(checkpoints / "step-9")


def test_where_there_is_no_directory_there_are_no_checkpoints(tmp_path: Path) -> None:
    assert files.published(tmp_path / "nowhere") == []


def test_publishing_a_step_again_replaces_it(checkpoints: Path) -> None:
    publish(checkpoints, 5, b"old")
    path = publish(checkpoints, 5, b"new", attempt="4711.1")
    assert (path / "state.pt").read_bytes() == b"newstate.pt"
    manifest = files.read_manifest(path)
    files.verify(path, manifest, iter(manifest.files))
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-5"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_checkpoint(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(checkpoints, 5, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    staging = Staging(checkpoints, "4711.1", 5)
    with staging.open("state.pt") as file:
        file.write(b"new")
    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        staging.publish({"state.pt": file.result}, world_size=1, plan_hash=None, began=0.0)
    staging.discard()
    [path] = files.published(checkpoints)
    files.verify(path, files.read_manifest(path), iter(["state.pt", "rank-0.pt"]))
    assert (path / "state.pt").read_bytes() == b"oldstate.pt"


def test_a_file_is_on_disk_once_it_is_closed_and_not_synced_after_a_failure(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Staging(checkpoints, ATTEMPT, 1).open("a") as file:
        file.write(b"x")
        file.flush()
    assert len(synced) == 1
    with pytest.raises(RuntimeError), Staging(checkpoints, ATTEMPT, 1).open("b") as file:
        raise RuntimeError
    assert len(synced) == 1


def test_a_changed_byte_is_found(checkpoints: Path) -> None:
    path = publish(checkpoints, 5, b"12345")
    manifest = files.read_manifest(path)
    content = bytearray((path / "state.pt").read_bytes())
    content[2] ^= 1
    (path / "state.pt").write_bytes(content)
    files.verify(path, manifest, iter(["rank-0.pt"]))
    with pytest.raises(CheckpointError, match=r"state\.pt is not what was written"):
        files.verify(path, manifest, iter(["rank-0.pt", "state.pt"]))


def test_a_file_that_was_cut_short_is_found(checkpoints: Path) -> None:
    path = publish(checkpoints, 5, b"12345")
    os.truncate(path / "state.pt", 4)
    with pytest.raises(CheckpointError, match=r"state\.pt has 4 bytes, its manifest says 13"):
        files.verify(path, files.read_manifest(path), iter(["state.pt"]))


def test_a_file_that_is_missing_is_found(checkpoints: Path) -> None:
    path = publish(checkpoints, 5)
    (path / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read: No such file"):
        files.verify(path, files.read_manifest(path), iter(["state.pt"]))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\x00" * 64])
def test_a_manifest_that_is_no_json_is_refused(checkpoints: Path, content: bytes) -> None:
    path = publish(checkpoints, 5)
    (path / "MANIFEST.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
        files.read_manifest(path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"step": None},
        {"step": "x"},
        {"files": []},
        {"files": {"a": 1}},
        {"files": {"a": {"bytes": 1}}},
        {"seconds": {}},
    ],
)
def test_a_manifest_with_other_content_is_refused(checkpoints: Path, change: dict[str, object]) -> None:
    path = publish(checkpoints, 5)
    data = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
        files.read_manifest(path)


def test_pruning_keeps_the_newest(checkpoints: Path) -> None:
    for step in (1, 2, 10, 20):
        publish(checkpoints, step)
    gone = files.prune(checkpoints, 2)
    assert [path.name for path in gone] == ["step-2", "step-1"]
    assert [path.name for path in files.published(checkpoints)] == ["step-20", "step-10"]
    assert files.prune(checkpoints, 2) == []
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["step-10", "step-20"]


def test_pruning_never_deletes_the_last_checkpoint(checkpoints: Path) -> None:
    publish(checkpoints, 1)
    assert files.prune(checkpoints, 0) == []


def test_what_dead_attempts_left_is_swept_and_nothing_else(checkpoints: Path) -> None:
    publish(checkpoints, 1)
    for attempt in ("4711.0", "4711.1", "4711.10"):
        with Staging(checkpoints, attempt, 2).open("state.pt") as file:
            file.write(b"half")
    (checkpoints / ".trash-step-0").mkdir()
    (checkpoints / "mine.txt").write_text("a user's file")
    files.sweep(checkpoints, "4711.1")
    assert sorted(entry.name for entry in checkpoints.iterdir()) == [".4711.1-step-2", "mine.txt", "step-1"]


def test_sweeping_where_there_is_nothing_is_fine(tmp_path: Path) -> None:
    files.sweep(tmp_path / "nowhere", ATTEMPT)
    assert not (tmp_path / "nowhere").exists()
