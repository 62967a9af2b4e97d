"""A directory that is followed when somebody renames it."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.system.directories.followed_directory import FollowedDirectory, without_aliases


def test_what_is_written_by_the_alias_is_where_the_directory_is(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    directory = FollowedDirectory(path)
    assert directory.displacement() == ""
    (tmp_path / "runs").rename(tmp_path / "renamed")
    (directory.alias / "saved").mkdir()
    assert (tmp_path / "renamed" / "run" / "saved").is_dir()
    assert directory.displacement() == (
        f"its directory was moved from {path} to {tmp_path / 'renamed' / 'run'} while it ran"
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
