"""A directory in use is deleted, or moved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.site import until

from slurmtrain.system.directories import deletion_watch
from slurmtrain.system.directories.deletion_watch import DeletionWatch


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with a file."""
    path = tmp_path / "runs" / "r1"
    path.mkdir(parents=True)
    (path / "plan.json").touch()
    return path


@pytest.fixture
def watch(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeletionWatch]:
    monkeypatch.setattr(deletion_watch, "_PERIOD_S", 0.01)
    watch = DeletionWatch(run, "plan.json")
    yield watch
    watch.close()


def test_a_deleted_directory_is_noticed(run: Path, watch: DeletionWatch) -> None:
    assert not watch.deleted
    shutil.rmtree(run)
    until(lambda: watch.deleted, "the deletion")


def test_a_moved_directory_is_not_deleted_until_it_is(run: Path, watch: DeletionWatch) -> None:
    moved = run.parent.rename(run.parent.with_name("moved"))
    run.mkdir(parents=True)
    assert not watch._is_gone()
    assert not watch.deleted
    shutil.rmtree(moved)
    until(lambda: watch.deleted, "the deletion")


def test_a_directory_of_which_open_files_remain_is_deleted(run: Path, watch: DeletionWatch) -> None:
    """A network file system keeps a deleted file that is open, and so its directory."""
    (run / ".nfs0001").touch()
    (run / "plan.json").unlink()
    until(lambda: watch.deleted, "the deletion")
