"""Taking snapshots of repositories and folders, and making a run's own copy of one."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.repositories import PYTHON, copied, git, paths, snapshot_of, source, write

from slurmtrain.errors import PathError, SlurmtrainError, UserError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.runtime.code import code_copy as tree_module
from slurmtrain.runtime.code.code_copy import make_tree, results_in_copy
from slurmtrain.runtime.code.packages import find_editable
from slurmtrain.snapshots import snapshot_store as store_module
from slurmtrain.snapshots.snapshot_store import take

# --- what is taken --------------------------------------------------------------------------------------------------


def test_a_snapshot_has_tracked_modified_and_untracked_files_but_not_ignored_or_deleted_ones(repo: Path) -> None:
    write(repo, "train.py", "edited")
    write(repo, "odd\nname.py")
    write(repo, "ignored/data")
    write(repo, "__pycache__/x.pyc")
    write(repo, "env/pyvenv.cfg")
    write(repo, "env/lib/x.py")
    write(repo, "gone.py")
    git(repo, "add", "gone.py")
    (repo / "gone.py").unlink()
    (repo / "l\udcff").symlink_to("train.py")
    before = git(repo, "status", "--porcelain")
    snapshot, run = snapshot_of(repo)
    assert paths(snapshot, run) == {".gitignore", "train.py", "odd\nname.py", "l\udcff"}
    assert git(repo, "status", "--porcelain") == before
    make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    assert (copy / "train.py").read_text() == "edited"
    assert (copy / "l\udcff").readlink() == Path("train.py")
    assert (copy / "ignored").readlink() == repo / "ignored"
    assert (copy / "env").readlink() == repo / "env"
    assert not (copy / ".git").is_symlink()


def test_submodules_and_nested_repositories_belong_to_the_code_and_work_trees_do_not(
    repo: Path, tmp_path: Path
) -> None:
    for name in ("module", "vendored"):
        other = tmp_path / name
        other.mkdir()
        git(other, "init", "--quiet")
        write(other, f"{name}.py")
        git(other, "add", ".")
        git(other, "commit", "--quiet", "--message", "x")
    git(repo, "submodule", "--quiet", "add", str(tmp_path / "module"), "libs/module")
    git(repo, "clone", "--quiet", str(tmp_path / "vendored"), "vendored")
    git(repo, "worktree", "add", "--quiet", "feature")
    write(repo, "libs/module/new.py")
    snapshot, run = snapshot_of(repo, workdir=repo / "libs/module")
    assert snapshot.root == str(repo)
    assert {"libs/module/module.py", "libs/module/new.py", "vendored/vendored.py"} < paths(snapshot, run)
    assert not any(path.startswith("feature/") for path in paths(snapshot, run))


def test_a_merge_with_conflicts_is_refused(repo: Path) -> None:
    git(repo, "checkout", "--quiet", "-b", "other")
    write(repo, "train.py", "theirs")
    git(repo, "commit", "--quiet", "--all", "--message", "theirs")
    git(repo, "checkout", "--quiet", "main")
    write(repo, "train.py", "ours")
    git(repo, "commit", "--quiet", "--all", "--message", "ours")
    with pytest.raises(subprocess.CalledProcessError):
        git(repo, "merge", "--quiet", "other")
    with pytest.raises(UserError, match=r"train\.py in the repository .* have merge conflicts; resolve"):
        snapshot_of(repo)


def test_a_repository_without_a_commit_is_taken_like_any_other(tmp_path: Path) -> None:
    root = tmp_path / "home" / "new"
    root.mkdir(parents=True)
    git(root, "init", "--quiet")
    write(root, "train.py")
    snapshot, run = snapshot_of(root)
    assert paths(snapshot, run) == {"train.py"}


def test_without_git_the_folder_is_taken_by_rules(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for path in (
        ".venv/x.py",
        "sub/__pycache__/x.pyc",
        "model.pt",
        "ignored/x",
        "conda/conda-meta/history",
        "secret.md",
    ):
        write(repo, path)
    write(repo, ".slurmtrainignore", "secret.*\n")
    runs = RunsRoot(tmp_path / "runs")
    runs.path.mkdir()
    snapshot, notes = take(runs, source(repo), PYTHON)
    assert paths(snapshot, runs.run("r")) == {".gitignore", ".slurmtrainignore", "train.py"}
    assert notes == [f"git cannot list the code (there is no git on PATH), so all files in {repo} count as code"]


def test_a_working_directory_that_git_ignores_is_taken_itself(repo: Path) -> None:
    write(repo, "ignored/try/train.py", "tried")
    snapshot, run = snapshot_of(repo, workdir=repo / "ignored/try")
    assert (snapshot.root, paths(snapshot, run)) == (str(repo / "ignored/try"), {"train.py"})


def test_patterns_add_ignored_files_and_leave_others_out(repo: Path) -> None:
    for path in ("pkg/_c.so", "pkg/deep/_d.so", "ignored/a", "ignored/b/c", "big.bin"):
        write(repo, path)
    snapshot, run = snapshot_of(repo, include=("pkg/**/*.so", "ignored"), exclude=("*.bin",))
    added = {"pkg/_c.so", "pkg/deep/_d.so", "ignored/a", "ignored/b/c"}
    assert paths(snapshot, run) == {".gitignore", "train.py"} | added
    with pytest.raises(UserError, match=r"'code\.include': nothing in .* matches 'pkg/\*\.dll'"):
        snapshot_of(repo, include=("pkg/*.dll",))
    with pytest.raises(UserError, match=r"is not in the repository"):
        snapshot_of(repo, include=("../repo/train.py",))


def test_runs_are_no_code_wherever_they_are(repo: Path) -> None:
    runs = RunsRoot(repo / "runs")
    write(repo, "runs/abc/plan.json")
    snapshot, _ = take(runs, source(repo), PYTHON)
    assert paths(snapshot, runs.run("abc")) == {".gitignore", "train.py"}
    assert snapshot.beside == {"": ["runs"]}


def test_too_much_is_refused_with_the_figure_the_largest_and_the_cure(repo: Path) -> None:
    write(repo, "data/a.bin", "x" * 3_000_000)
    write(repo, "b.bin", "x" * 1_500_000)
    with pytest.raises(UserError) as caught:
        snapshot_of(repo, max_size=1 << 20)
    assert str(caught.value) == (
        f"the code in {repo} takes 4.3 MB, but a snapshot may take at most 1.0 MB (code.max_size); the largest are "
        "data/ 2.9 MB, b.bin 1.4 MB, .gitignore 0.0 MB, train.py 0.0 MB: exclude files that are not code "
        "('code.exclude', or "
        ".slurmtrainignore), raise the limit, or set 'code: none' to run the code as it is when the job starts"
    )


# --- storing --------------------------------------------------------------------------------------------------------


def test_the_same_content_is_stored_once_and_unchanged_files_are_not_read_again(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = (1_600_000_000_000_000_000,) * 2
    for path in ("train.py", ".gitignore"):
        os.utime(repo / path, ns=past)
    # Times of changes of status cannot be set: what was written just now may be written again in the same tick.
    monkeypatch.setattr(store_module, "_TICK_NS", -(10**12))
    first, run = snapshot_of(repo)
    read: list[str] = []
    monkeypatch.setattr(store_module, "hash_one", lambda root, path, status: read.append(path))
    monkeypatch.setattr(store_module, "_write_snapshot", lambda *_: pytest.fail("stored again"))
    again, _ = snapshot_of(repo)
    assert (again, read) == (first, [])
    stored = [path for path in run.snapshot("").path.iterdir() if path.is_dir()]
    assert stored == [run.snapshot(first.hash).path]
    assert {path.stat().st_mode & 0o777 for path in stored[0].iterdir()} == {0o400}


def test_a_file_that_has_just_been_written_is_read_again(repo: Path) -> None:
    first, _ = snapshot_of(repo)
    status = (repo / "train.py").stat()
    write(repo, "train.py", "new")
    os.utime(repo / "train.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    second, _ = snapshot_of(repo)
    assert first.hash != second.hash


def test_what_is_stored_is_what_the_manifest_says_even_if_a_file_changes_meanwhile(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = store_module.hash_files

    def change(root: Path, files: Any, cache: Path) -> Any:
        manifest = really(root, files, cache)
        write(repo, "train.py", "changed")
        return manifest

    monkeypatch.setattr(store_module, "hash_files", change)
    assert (copied(repo) / "train.py").read_text() == "changed"


def test_a_failed_command_leaves_nothing_and_a_killed_one_what_is_removed_a_day_later(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = snapshot_of(repo)
    snapshots = run.snapshot("").path
    for name, age in ((".new-old", 2 * 86400), (".new-young", 0)):
        (snapshots / name).mkdir()
        at = (snapshots / name).stat().st_mtime - age
        os.utime(snapshots / name, (at, at))
    write(repo, "new.py")
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_write_snapshot", lambda *_: (_ for _ in ()).throw(OSError(28, "full", "x")))
        with pytest.raises(PathError, match=r"cannot take a snapshot of .*: x: no space left on the device"):
            snapshot_of(repo)
    assert [path.name for path in snapshots.glob(".new-*")] == [".new-young"]


# --- a run's own copy -----------------------------------------------------------------------------------------------


def test_a_copy_has_the_modes_and_links_of_the_repository_and_links_to_everything_else(repo: Path) -> None:
    write(repo, "run.sh", "#!/bin/sh\n")
    (repo / "run.sh").chmod(0o755)
    write(repo.parent, "data/x")
    write(repo, "results/.gitkeep")
    (repo / "outside").symlink_to("../data")
    (repo / "inside").symlink_to(repo / "train.py")
    copy = copied(repo)
    assert os.access(copy / "run.sh", os.X_OK)
    assert (copy / "train.py").stat().st_mode & 0o777 == 0o600
    assert (copy / "outside").readlink() == repo.parent / "data"
    assert (copy / "inside").readlink() == Path("train.py")
    assert (copy / "results").readlink() == repo / "results"
    assert (copy / "../data/x").read_text() == "x"


def test_what_is_made_after_submission_is_linked_unless_it_is_code(repo: Path) -> None:
    write(repo, "model.py")
    write(repo, "ignored/x")
    snapshot, run = snapshot_of(repo)
    for path in ("made/x", "late.py", "model/__init__.py", "late.json"):
        write(repo, path)
    make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    assert {path.name for path in copy.iterdir() if path.is_symlink()} == {"ignored", "made", "late.json"}


def test_a_copy_is_made_once_and_keeps_what_scripts_have_written(repo: Path) -> None:
    snapshot, run = snapshot_of(repo)
    assert make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    write(copy, "train.py", "overwritten by the script")
    write(copy, "result.txt")
    write(copy, "out/__pycache__/x.pyc")
    (copy / "out" / "link").symlink_to(repo)
    assert not make_tree(run, snapshot)
    assert results_in_copy(run) == len("x")
    assert (copy / "train.py").read_text() == "overwritten by the script"
    assert (repo / "train.py").read_text() == "old"


def test_a_newer_snapshot_replaces_the_code_and_nothing_else(repo: Path) -> None:
    write(repo, "gone.py")
    write(repo, "ignored/x")
    snapshot, run = snapshot_of(repo)
    make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    write(copy, "checkpoint.bin", "kept")
    (repo / "gone.py").unlink()
    write(repo, "train.py", "new")
    write(repo, ".gitignore", "*.so\n")
    write(repo, "ignored/code.py", "in the repository")
    newer, _ = snapshot_of(repo)
    assert make_tree(run, newer)
    assert not (copy / "gone.py").exists()
    assert (copy / "train.py").read_text() == "new"
    assert (copy / "checkpoint.bin").read_text() == "kept"
    # It was a link to the repository, where nothing may be written.
    assert not (copy / "ignored").is_symlink()
    assert (copy / "ignored/code.py").read_text() == "in the repository"


@pytest.mark.parametrize("at", ["directories_of", "_write_files", "_link_rest", "_flush", "write_json"])
def test_a_copy_is_completed_after_a_kill_at_any_point(repo: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    write(repo, "src/x.py", "x")
    write(repo, "ignored/x")
    snapshot, run = snapshot_of(repo)
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, at, kill)
        with pytest.raises(Killed):
            make_tree(run, snapshot)
    assert make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    assert ((copy / "src/x.py").read_text(), (copy / "train.py").read_text()) == ("x", "old")
    assert (copy / "ignored").is_symlink()


def test_after_kills_no_file_is_left_of_any_earlier_snapshot(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, run = snapshot_of(repo)
    make_tree(run, first)
    write(repo, "package/second.py")
    second, _ = snapshot_of(repo)
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "_link_rest", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            make_tree(run, second)
    assert (first.tree(run.code) / "package/second.py").exists()
    write(first.tree(run.code), "result.txt")
    assert results_in_copy(run) == len("x")
    shutil.rmtree(repo / "package")
    make_tree(run, first)
    assert not (first.tree(run.code) / "package").exists()


def test_no_file_of_the_user_is_removed_through_a_link_in_place_of_what_was_code(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repo, "tables/inner/x.csv", "mine")
    first, run = snapshot_of(repo)
    make_tree(run, first)
    write(repo, ".gitignore", "tables/\n")
    second, _ = snapshot_of(repo)
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "_flush", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            make_tree(run, second)
    assert (second.tree(run.code) / "tables").is_symlink()
    make_tree(run, second)
    assert (repo / "tables/inner/x.csv").read_text() == "mine"
    assert (second.tree(run.code) / "tables/inner/x.csv").read_text() == "mine"


def test_a_snapshot_of_the_repository_next_door_does_not_write_to_it(repo: Path) -> None:
    other = repo.with_name("other")
    shutil.copytree(repo, other)
    first, run = snapshot_of(repo)
    make_tree(run, first)
    second, _ = snapshot_of(other)
    write(other, "train.py", "edited since")
    make_tree(run, second)
    assert not second.tree(run.code).is_symlink()
    assert (second.tree(run.code) / "train.py").read_text() == "old"
    assert (other / "train.py").read_text() == "edited since"
    assert not (other / ".git/objects/info/alternates").exists()


@pytest.mark.parametrize("name", ["contents", "manifest"])
def test_a_damaged_snapshot_is_replaced_by_the_next_submission_of_the_same_code(repo: Path, name: str) -> None:
    snapshot, run = snapshot_of(repo)
    path = getattr(run.snapshot(snapshot.hash), name)
    content = path.read_bytes()
    path.chmod(0o600)
    for damaged in (content[:-5], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert snapshot_of(repo)[0].hash == snapshot.hash
        assert path.read_bytes() == content
        path.chmod(0o600)
    make_tree(run, snapshot)


def test_a_missing_or_damaged_snapshot_is_named_with_the_cure(repo: Path) -> None:
    snapshot, run = snapshot_of(repo)
    stored = run.snapshot(snapshot.hash)
    for path in (stored.manifest, stored.contents):
        path.chmod(0o600)
    content = stored.contents.read_bytes()
    damages = (content[:-12], gzip.compress(b"other code, of any length"), b"no gzip")
    for damage in damages:
        stored.contents.write_bytes(damage)
        with pytest.raises(
            SlurmtrainError, match=r"the snapshot .* is damaged .*; 'slurmtrain resume --code now' uses"
        ):
            make_tree(run, snapshot)
    stored.manifest.write_text("{}")
    with pytest.raises(SlurmtrainError, match=r"is damaged \(its content has changed\)"):
        make_tree(run, snapshot)
    stored.manifest.unlink()
    with pytest.raises(SlurmtrainError, match=r"needs the code of snapshot .*; 'slurmtrain resume --code now'"):
        make_tree(run, snapshot)


# --- editable installs ----------------------------------------------------------------------------------------------


def test_editable_installs_of_the_repository_are_preceded_or_named(repo: Path, tmp_path: Path) -> None:
    packages = tmp_path / "env/lib/python3.11/site-packages"
    write(packages, "_a.pth", f"{repo}/src\n/elsewhere\n# {repo}/comment\n")
    write(packages, "__editable__.b-1.pth", "import __editable___b_1_finder; __editable___b_1_finder.install()")
    finder = f"MAPPING: dict[str, str] = {{'b': '{repo}/lib/b', 'renamed': '{repo}/lib/c', 'far': '/elsewhere/far'}}\n"
    write(packages, "__editable___b_1_finder.py", f"from x import y\n{finder}NAMESPACES = {{}}\n")
    write(packages, "_meson_pkg-editable.pth", "import _meson_pkg_editable_loader")
    write(packages, "_meson_pkg_editable_loader.py", f"install('{repo}/build')")
    write(packages, "_other_editable.pth", "import _other_editable")
    write(packages, "_other_editable.py", "install('/elsewhere')")
    write(packages, "broken.pth", "import __editable___c_finder")
    write(packages, "__editable___c_finder.py", "MAPPING = {open('x')}\n")
    editable = find_editable(tmp_path / "env/bin/python", repo)
    assert editable.import_roots == ["lib", "src"]
    [note] = editable.notes
    assert note.startswith("the snapshot does not cover the package meson_pkg: its editable install comes first")


def test_this_environment_can_be_read() -> None:
    assert find_editable(Path(sys.executable), Path("/nowhere")).import_roots == []


PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "trained"
version = "1"
[tool.setuptools.packages.find]
where = ["{where}"]
include = ["trained*"]
"""


def install(project: Path, environment: Path) -> Path:
    """Install a project as editable into a new environment without packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # By the pip and the setuptools of whoever runs the tests: nothing is downloaded.
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--prefix", environment, "--editable", project]
    subprocess.run(command, check=True, env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"})
    return environment / "bin" / "python"


def version_of(python: Path, path: str = "") -> str:
    """What an interpreter imports; ``path``: its PYTHONPATH."""
    environ = {"PYTHONPATH": path} if path else {}
    command = [python, "-c", "import trained.deep; print(trained.deep.VERSION)"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ, cwd="/").stdout.strip()


KINDS = {"src": "__editable__.trained-1.pth", ".": "__editable___trained_1_finder.py"}


@pytest.mark.parametrize("where", KINDS)
def test_an_editable_install_is_preceded_by_the_copy(repo: Path, tmp_path: Path, where: str) -> None:
    write(repo, "pyproject.toml", PROJECT.format(where=where))
    write(repo, f"{where}/trained/__init__.py", "")
    write(repo, f"{where}/trained/deep.py", "VERSION = 'old'\n")
    python = install(repo, tmp_path / "env")
    assert list((tmp_path / "env").glob(f"lib/python3*/site-packages/{KINDS[where]}"))
    assert find_editable(python, repo).import_roots == [where]
    snapshot, run = snapshot_of(repo)
    make_tree(run, snapshot)
    write(repo, f"{where}/trained/deep.py", "VERSION = 'new'\n")
    copy = snapshot.tree(run.code) / where
    assert (version_of(python), version_of(python, str(copy))) == ("new", "old")
