"""A directory in use is deleted, or moved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.site import until

from slurmtrain.system import directories
from slurmtrain.system.directories import DeletionWatch, FollowedDirectory, without_aliases


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with a file."""
    path = tmp_path / "runs" / "r1"
    path.mkdir(parents=True)
    (path / "plan.json").touch()
    return path


@pytest.fixture
def watch(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeletionWatch]:
    monkeypatch.setattr(directories, "_PERIOD_S", 0.01)
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


def test_what_is_written_by_the_alias_is_where_the_directory_is(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    directory = FollowedDirectory(path)
    assert directory.displacement() == ""
    (tmp_path / "runs").rename(tmp_path / "renamed")
    (directory.alias / "saved").mkdir()
    assert (tmp_path / "renamed" / "run" / "saved").is_dir()
    assert directory.displacement() == (
        f"its directory was moved from {path} to {tmp_path / 'renamed' / 'run'} while it was running"
    )
    # Another run, in a directory that has since been given the name.
    path.mkdir(parents=True)
    assert "was moved from" in directory.displacement()
    directory.close()


def test_a_directory_that_was_deleted_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    directory = FollowedDirectory(path)
    path.rmdir()
    assert directory.displacement() == f"its directory {path} was deleted"
    directory.close()


def test_people_read_paths_instead_of_aliases(tmp_path: Path) -> None:
    directory = FollowedDirectory(tmp_path)
    assert without_aliases(f"{directory.alias}/x is full") == f"{tmp_path}/x is full"
    directory.close()
    assert without_aliases("/proc/self/fd/9999 and nothing") == "/proc/self/fd/9999 and nothing"
