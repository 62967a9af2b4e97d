"""Git in a run's own copy of its code: it answers as the repository did when the run was submitted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.repositories import copied, git, paths, snapshot_of, write

from slurmtrain.model.experiment.code import CodeSnapshot, Revision
from slurmtrain.runtime.code.code_copy import make_tree, results_in_copy

QUESTIONS = (
    "rev-parse HEAD", "rev-parse --abbrev-ref HEAD", "status --porcelain", "diff HEAD", "log --format=%H",
    "describe --tags --dirty --always", "diff-index --name-status HEAD", "ls-files -o --exclude-standard",
)  # fmt: skip


def answers(root: Path) -> list[str]:
    return [git(root, *question.split()) for question in QUESTIONS]


def commit(root: Path, message: str = "more") -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", message)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with files of each kind, and its second commit checked out."""
    root = tmp_path / "home" / "repo"
    root.mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    for path in ("train.py", "gone.py", "with space/x.py", "new\nline.py", "results/.gitkeep", "weights.pt"):
        write(root, path, "old\n")
    write(root, ".gitignore", "data/\n")
    (root / "link.py").symlink_to(root / "train.py")
    commit(root, "first")
    git(root, "tag", "--annotate", "v1.0", "--message", "a release")
    write(root, "model.py")
    commit(root)
    return root


def test_git_answers_as_at_submission_and_nothing_is_written_to_the_repository(repo: Path) -> None:
    git(repo, "remote", "add", "origin", "https://me:password@localhost/digits.git")
    write(repo, "train.py", "new\n")
    (repo / "gone.py").unlink()
    for path in ("staged.py", "untracked.py", "data/x", "results/log.txt", "env/[1] *.bin"):
        write(repo, path)
    git(repo, "add", "staged.py")
    answered = answers(repo)
    assert "-1-g" in answered[5]
    assert "A  staged.py" in answered[2]
    index = (repo / ".git/index").read_bytes()
    snapshot, run = snapshot_of(repo, exclude=["with space/", "env/"])
    assert (repo / ".git/index").read_bytes() == index
    # By the time that it starts there is another commit, on another branch.
    git(repo, "checkout", "--quiet", "-b", "other")
    commit(repo, "third")
    snapshot = CodeSnapshot.from_dict(snapshot.to_dict())
    make_tree(run, snapshot)
    copy = snapshot.tree(run.code)
    now = answers(copy)
    # What the user does not want in the copy is neither changed nor new there.
    assert [line for line in now[2].splitlines() if "env" not in line] == [
        line for line in answered[2].splitlines() if "env" not in line
    ]
    assert now[:2] + now[3:-1] == answered[:2] + answered[3:-1]
    assert git(copy, "config", "remote.origin.url") == "https://localhost/digits.git\n"
    before = answers(repo)
    commit(copy, "in the copy")
    assert answers(repo) == before
    assert results_in_copy(run) == 0


def test_submodules_and_second_work_trees_have_revisions_of_their_own(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(repo), "library")
    git(repo, "submodule", "--quiet", "add", str(tmp_path / "library"), "library")
    commit(repo)
    git(repo / "library", "checkout", "--quiet", "HEAD~1")
    copy = copied(repo)
    for inside in ("", "library"):
        assert answers(copy / inside) == answers(repo / inside)
    assert git(copy, "submodule", "status") == git(repo, "submodule", "status")
    work_tree = repo.parent / "second"
    git(repo, "worktree", "add", "--quiet", "-b", "branch", str(work_tree), "HEAD~1")
    assert answers(copied(work_tree)) == answers(work_tree)


def test_repositories_that_are_no_code_are_left_alone(repo: Path, tmp_path: Path) -> None:
    for name in ("nested", "data/inner", "links"):
        git(tmp_path, "clone", "--quiet", str(repo), str(repo / name))
    git(repo, "submodule", "--quiet", "add", str(repo), "library")
    commit(repo)
    names = ("nested", "data/inner", "library", "links")
    before = [(repo / name / ".git").stat().st_mtime_ns for name in names]
    copy = copied(repo, exclude=["nested/", "library/", "links/"])
    assert (copy / "nested").is_symlink()
    assert (copy / "library").is_symlink()
    assert [(repo / name / ".git").stat().st_mtime_ns for name in names] == before
    for name in names:
        assert git(repo / name, "rev-parse", "HEAD")
        assert not (repo / name / ".git/objects/info/alternates").exists()


def test_of_a_sparse_shallow_clone_with_detached_head_it_knows_what_there_is(repo: Path, tmp_path: Path) -> None:
    clone = tmp_path / "home" / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repo}", str(clone))
    git(clone, "sparse-checkout", "set", "with space")
    git(clone, "checkout", "--quiet", "--detach")
    assert answers(copied(clone)) == answers(clone)


def test_the_commit_is_known_even_if_the_repository_is_gone_or_there_is_no_git(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(repo, "rev-parse", "HEAD")
    snapshot, run = snapshot_of(repo)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        make_tree(run, snapshot)
    shutil.rmtree(repo)
    later = run.path.parent / "later"
    later.mkdir()
    make_tree(gone := type(run)(later), snapshot)
    for each in (run, gone):
        assert git(snapshot.tree(each.code), "rev-parse", "HEAD") == head


def test_a_commit_of_the_same_files_gives_the_next_attempt_another_revision(repo: Path) -> None:
    write(repo, "train.py", "new\n")
    first, run = snapshot_of(repo)
    make_tree(run, first)
    commit(repo)
    second, _ = snapshot_of(repo)
    assert second.hash == first.hash
    assert make_tree(run, second)
    assert not make_tree(run, second)
    assert answers(second.tree(run.code)) == answers(repo)


def test_without_git_or_a_commit_or_with_a_repository_that_the_spec_includes_nothing_is_made(
    repo: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "home" / "empty"
    write(empty, "train.py")
    assert not (copied(empty) / ".git").exists()
    git(empty, "init", "--quiet")
    assert not (copied(empty) / ".git").exists()
    included, run = snapshot_of(repo, include=[".git"])
    make_tree(run, included)
    assert {"train.py", ".git/HEAD"} <= paths(included, run)
    assert (included.tree(run.code) / ".git/HEAD").read_bytes() == (repo / ".git/HEAD").read_bytes()


@pytest.mark.parametrize(
    "wrong", [{"path": "../x"}, {"path": "/x"}, {"commit": "main"}, {"branch": "main"}, {"branch": "refs/heads/a\nb"}]
)
def test_a_plan_that_leads_out_of_the_copy_is_refused(wrong: dict[str, str]) -> None:
    right = Revision(path="", commit="0" * 40).to_dict()
    assert Revision.from_dict(right).to_dict() == right
    with pytest.raises(ValueError, match="its 'code'"):
        Revision.from_dict({**right, **wrong})
