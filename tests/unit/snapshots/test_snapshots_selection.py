"""Snapshots of repositories in odd states, and of files that cannot be read as they were listed."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.repositories import PYTHON, copied, git, paths, snapshot_of, source, write

from slurmtrain.errors import NoSnapshot, PathError
from slurmtrain.model.experiment.code import CodeSnapshot
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.code.code_copy import make_tree
from slurmtrain.snapshots import selection as listings
from slurmtrain.snapshots import snapshot_store as store_module
from slurmtrain.snapshots.snapshot_store import preview_snapshot, take


def notes_on(root: Path) -> list[str]:
    """What a submission says of the code in this directory."""
    runs = RunsRoot(root.parent.parent / "runs")
    runs.path.mkdir(exist_ok=True)
    return take(runs, source(root), PYTHON)[1]


def test_a_second_work_tree_has_a_snapshot_of_its_own(repo: Path) -> None:
    git(repo, "worktree", "add", "--quiet", "../tree")
    tree = repo.parent / "tree"
    write(tree, "train.py", "in the tree")
    assert (copied(tree) / "train.py").read_text() == "in the tree"


def test_a_configuration_that_only_its_owner_can_read_is_no_code(repo: Path) -> None:
    write(repo, "slurmtrain.yaml", "notify: {hook: https://example.org/secret}\n")
    (repo / "slurmtrain.yaml").chmod(0o644)
    assert "slurmtrain.yaml" in paths(*snapshot_of(repo))
    (repo / "slurmtrain.yaml").chmod(0o600)
    assert "slurmtrain.yaml" not in paths(*snapshot_of(repo))
    assert (copied(repo) / "slurmtrain.yaml").is_symlink()


def test_a_bare_repository_is_taken_as_a_folder(repo: Path) -> None:
    bare = repo.parent / "bare.git"
    git(repo, "clone", "--quiet", "--bare", ".", str(bare))
    snapshot, run = snapshot_of(bare)
    assert snapshot.root == str(bare)
    assert "HEAD" in paths(snapshot, run)


def test_a_submodule_that_is_not_initialised_is_named(repo: Path, tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    git(module, "init", "--quiet")
    write(module, "module.py")
    git(module, "add", ".")
    git(module, "commit", "--quiet", "--message", "x")
    git(repo, "submodule", "--quiet", "add", str(module), "libs/module")
    git(repo, "submodule", "--quiet", "deinit", "--force", "libs/module")
    [note] = notes_on(repo)
    assert (
        note == "some submodules are not initialised, so runs will lack their files: libs/module ('git submodule "
        f"update --init' in {repo})"
    )


def test_of_a_sparse_checkout_and_of_large_files_what_is_in_the_work_tree_is_taken(repo: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    write(repo, "src/x.py")
    write(repo, "assets/large.bin")
    write(repo, "weights.bin", pointer)
    write(repo, ".gitattributes", "*.bin filter=lfs\n")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "--message", "more")
    git(repo, "sparse-checkout", "set", "--cone", "src")
    snapshot, run = snapshot_of(repo)
    assert paths(snapshot, run) == {".gitattributes", ".gitignore", "src/x.py", "train.py", "weights.bin"}
    make_tree(run, snapshot)
    assert (snapshot.tree(run.code) / "weights.bin").read_text() == pointer


@pytest.mark.parametrize("with_git", [True, False])
def test_names_that_are_hardly_names_and_links_that_lead_in_circles_are_copied(repo: Path, *, with_git: bool) -> None:
    if not with_git:
        subprocess.run(["rm", "-r", repo / ".git"], check=True)
    names = ["two\nlines.py", " ", "-rf", "a\tb", "\udcff\udcfe.py", "*", "'\"$HOME`x`", "ü" * 100]
    for name in names:
        write(repo, f"odd/{name}", name.encode(errors="surrogateescape").hex())
    (repo / "odd/self").symlink_to("self")
    (repo / "odd/up").symlink_to("..")
    (repo / "odd/gone").symlink_to("/no/such/place")
    os.mkfifo(repo / "odd/pipe")
    copy = copied(repo)
    assert [(copy / "odd" / name).read_text() for name in names] == [
        name.encode(errors="surrogateescape").hex() for name in names
    ]
    links = {name: str((copy / "odd" / name).readlink()) for name in ("self", "up", "gone")}
    assert links == {"self": "self", "up": "..", "gone": "/no/such/place"}


def test_a_file_that_disappears_or_grows_while_it_is_read_does_no_harm(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repo, "swap.tmp")
    write(repo, "train.log.py", "line\n")
    really = store_module.hash_one

    def read(root: Path, path: str, status: os.stat_result, copy: Any = None) -> Any:
        if copy is None:
            (repo / "swap.tmp").unlink(missing_ok=True)
            (repo / "train.log.py").open("a").write("line\n")
        return really(root, path, status, copy)

    monkeypatch.setattr(store_module, "hash_one", read)
    snapshot, run = snapshot_of(repo)
    make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    assert sorted(path.name for path in copy.iterdir()) == [".git", ".gitignore", "train.log.py", "train.py"]
    assert (copy / "train.log.py").read_text() == (repo / "train.log.py").read_text()


def test_a_file_that_disappears_after_its_hash_was_taken_is_left_out(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repo, "swap.tmp")
    really = store_module.hash_files

    def hash_files(*arguments: Any) -> Any:
        manifest = really(*arguments)
        (repo / "swap.tmp").unlink()
        return manifest

    monkeypatch.setattr(store_module, "hash_files", hash_files)
    snapshot, run = snapshot_of(repo)
    assert paths(snapshot, run) == {".gitignore", "train.py"}


def test_a_file_that_cannot_be_read_is_named(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_root: Path, path: str, _status: os.stat_result) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(store_module, "hash_one", read)
    with pytest.raises(PathError, match=r"cannot take a snapshot of .*/repo: \S+: permission denied"):
        snapshot_of(repo)


def test_a_directory_that_cannot_be_written_to_has_a_snapshot_like_any_other(repo: Path) -> None:
    subprocess.run(["chmod", "-R", "a-w", repo], check=True)
    try:
        assert (copied(repo) / "train.py").read_text() == "old"
    finally:
        subprocess.run(["chmod", "-R", "u+w", repo], check=True)


def test_a_listing_that_takes_too_long_is_given_up(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "_TIMEOUT_S", 0.0)
    with pytest.raises(NoSnapshot, match=r"git has not listed the files of .* within 0 s; set 'workdir' to"):
        snapshot_of(repo)
    subprocess.run(["rm", "-r", repo / ".git"], check=True)
    monkeypatch.setattr(listings, "_TIMEOUT_S", -1.0)
    with pytest.raises(NoSnapshot, match=r"the files of .* have not been listed within -1 s; set 'workdir' to"):
        snapshot_of(repo)


def test_a_preview_has_the_figures_of_the_snapshot_and_stores_nothing(repo: Path) -> None:
    runs = RunsRoot(repo.parent.parent / "runs")
    before, notes = preview_snapshot(runs, source(repo), PYTHON)
    assert not runs.path.exists()
    snapshot, _ = snapshot_of(repo)
    plain = snapshot.to_dict()
    del plain["revisions"]
    assert (before.to_dict(), notes) == ({**plain, "snapshot": ""}, [])
    assert isinstance(before, CodeSnapshot)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's home directory."""
    directory = tmp_path / "users" / "me"
    directory.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(directory))
    return directory


def runs_of(tmp_path: Path) -> RunsRoot:
    runs = RunsRoot(tmp_path / "runs")
    runs.path.mkdir(exist_ok=True)
    return runs


def take_by_default(workdir: Path, tmp_path: Path, **more: Any) -> CodeSnapshot:
    return take(runs_of(tmp_path), replace(source(workdir), by_default=True, **more), PYTHON)[0]


def test_directories_of_no_project_have_none(home: Path, tmp_path: Path) -> None:
    for directory, why in (
        (home, "is your home directory"),
        (home.parent, "holds your home directory"),
        (Path("/"), "holds your home directory"),
        (Path("/var/tmp"), "is for temporary files of all users"),
    ):
        with pytest.raises(NoSnapshot) as caught:
            take_by_default(directory, tmp_path)
        assert str(caught.value) == f"{directory} {why}; set 'workdir' to the directory of the code"


def test_a_repository_of_a_home_directory_is_that_of_its_settings(home: Path, tmp_path: Path) -> None:
    git(home, "init", "--quiet")
    write(home, "project/train.py")
    write(home, "huge/data")
    snapshot = take_by_default(home / "project", tmp_path)
    assert snapshot.root == str(home / "project")
    assert paths(snapshot, runs_of(tmp_path).run("r")) == {"train.py"}
    with pytest.raises(NoSnapshot, match="is your home directory"):
        take_by_default(home, tmp_path)
    # Who asks for one gets it.
    explicit, _ = take(runs_of(tmp_path), source(home), PYTHON)
    assert explicit.files == 2


def test_a_folder_below_home_is_a_project_with_and_without_git(home: Path, tmp_path: Path, repo: Path) -> None:
    write(home, "project/train.py")
    assert take_by_default(home / "project", tmp_path).files == 1
    assert take_by_default(repo, tmp_path).files == 2


def test_what_the_command_writes_to_is_no_code_unless_there_is_code_in_it(repo: Path, tmp_path: Path) -> None:
    for path in ("out/table.csv", "out/deep/log.txt", "best.json", "src/x.py", "src/x.json"):
        write(repo, path)
    git(repo, "add", ".")
    no_code = frozenset({str(repo / name) for name in ("out", "best.json", "src")} | {"/elsewhere"})
    snapshot = take_by_default(repo, tmp_path, no_code=no_code)
    held = {".gitignore", "train.py", "src/x.py", "src/x.json"}
    assert paths(snapshot, runs_of(tmp_path).run("r")) == held
    assert snapshot.beside == {"": ["best.json", "out"]}


def test_several_submissions_of_one_directory_at_once_store_it_once(repo: Path, tmp_path: Path) -> None:
    for number in range(50):
        write(repo, f"src/module{number}.py", f"{number}")
    snapshots: list[CodeSnapshot] = []
    threads = [threading.Thread(target=lambda: snapshots.append(take_by_default(repo, tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(snapshots) == 6
    assert len({snapshot.hash for snapshot in snapshots}) == 1
    stored = sorted(path.name for path in runs_of(tmp_path).snapshots.iterdir() if path.is_dir())
    assert stored == [snapshots[0].hash]
