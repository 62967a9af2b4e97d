"""Snapshots that nobody has asked for: of projects, and not of home directories."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.repositories import PYTHON, git, paths, source, write

from slurmtrain.errors import NoSnapshot
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.spec.code import CodeSnapshot
from slurmtrain.snapshots.store import take


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
