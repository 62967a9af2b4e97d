"""Removing a tree: nothing outside it changes, and what stays is told with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmtrain.ops.deletion.tree_removal import remove_tree

KIB = 1024


def nothing(_: str) -> bool:
    return False


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "big").write_bytes(b"x" * 64 * KIB)
    (tree / "note").write_text("kept")
    return tree


def test_everything_goes_but_the_directory_itself_and_the_space_is_told(tree: Path) -> None:
    would = remove_tree(tree, nothing, dry=True)
    assert (tree / "deep" / "er" / "big").exists()
    removal = remove_tree(tree, nothing)
    assert list(tree.iterdir()) == []
    assert removal == would
    assert removal.bytes >= 64 * KIB
    assert remove_tree(tree, nothing).bytes == 0


def test_what_is_to_be_kept_stays_with_the_directories_above_it(tree: Path) -> None:
    remove_tree(tree, lambda path: path == "deep/er/big")
    assert sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*")) == ["deep", "deep/er", "deep/er/big"]


def test_a_link_goes_and_what_it_points_to_stays(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tree / "link").symlink_to(outside)
    (tree / "dangling").symlink_to("nowhere")
    removal = remove_tree(tree, nothing)
    assert sorted(removal.links) == [str(tree / "dangling"), str(tree / "link")]
    assert (outside / "precious").read_text() == "x"
    assert list(tree.iterdir()) == []


def test_a_file_that_has_another_name_elsewhere_is_unchanged_there_and_frees_nothing(
    tree: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    big = tree / "deep" / "er" / "big"
    big.chmod(0o400)
    shared.hardlink_to(big)
    before = remove_tree(tree / "deep", nothing, dry=True)
    assert (before.bytes, remove_tree(tree / "deep", nothing).bytes) == (0, 0)
    assert (shared.read_bytes(), shared.stat().st_mode & 0o777) == (b"x" * 64 * KIB, 0o400)


def test_a_file_with_two_names_in_the_tree_is_counted_once(tree: Path) -> None:
    (tree / "again").hardlink_to(tree / "deep" / "er" / "big")
    planned, freed = remove_tree(tree, nothing, dry=True).bytes, remove_tree(tree, nothing).bytes
    assert planned == freed
    assert 64 * KIB <= freed < 128 * KIB


def test_directories_and_files_that_cannot_be_written_to_go_too(tree: Path) -> None:
    (tree / "note").chmod(0o400)
    (tree / "deep" / "er").chmod(0o500)
    (tree / "deep").chmod(0o500)
    os.mkfifo(tree / "fifo")
    assert remove_tree(tree, nothing).problems == []
    assert list(tree.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other accounts")
def test_what_is_somebody_elses_stays(tree: Path) -> None:
    os.chown(tree / "note", 12345, 12345)
    os.chown(tree / "deep", 12345, 12345)
    removal = remove_tree(tree, nothing)
    assert (tree / "note").exists()
    assert (tree / "deep" / "er" / "big").exists()
    assert len(removal.problems) == 2
    assert all("belongs to" in problem for problem in removal.problems)


def test_a_directory_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    assert remove_tree(tmp_path / "nowhere", nothing).problems == []


def test_directories_too_deep_in_each_other_are_a_problem_in_a_sentence(tree: Path) -> None:
    handle = os.open(tree, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    problems = remove_tree(tree, nothing).problems
    assert f"{tree} has directories too deep in each other: 'rm -r' it" in problems
    assert not (tree / "note").exists()
