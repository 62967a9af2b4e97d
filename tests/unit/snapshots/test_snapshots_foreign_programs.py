"""A repository may name programs in many places; none of them is run because slurmtrain looks at its files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.repositories import copied, git, write

from slurmtrain.ops.submit.code_snapshots import find_provenance

HOOKS = ("post-index-change", "post-checkout", "pre-commit", "reference-transaction", "fsmonitor-watchman")


def program(place: Path) -> str:
    """A program that notes that it was run, in a file beside it, and hands on what it reads."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f'#!/bin/sh\necho "$0 $*" >> {place.parent}/ran\nexec cat\n')
    place.chmod(place.stat().st_mode | stat.S_IXUSR)
    return str(place)


def name_programs(root: Path, traps: Path) -> None:
    """Let a repository name a program wherever one can be named."""
    for key in ("clean", "smudge", "process"):
        git(root, "config", f"filter.trap.{key}", program(traps / f"filter-{key}"))
    git(root, "config", "filter.trap.required", "true")
    directory = Path(git(root, "rev-parse", "--absolute-git-dir").strip())
    included = directory / "more"
    included.write_text(f'[filter "Other.Trap"]\n\tclean = {program(traps / "included")}\n')
    git(root, "config", "include.path", "more")
    for key in ("diff.external", "diff.trap.textconv", "diff.trap.command", "core.fsmonitor", "core.sshCommand",
                "core.pager", "core.editor", "gpg.program", "credential.helper", "core.askPass"):  # fmt: skip
        git(root, "config", key, program(traps / key))
    git(root, "config", "submodule.recurse", "true")
    for hook in HOOKS:
        program(directory / "hooks" / hook)
        program(traps / "hooks" / hook)
    git(root, "config", "core.hooksPath", str(traps / "hooks"))
    write(directory, "info/attributes", "*.py filter=trap diff=trap\n*.bin filter=Other.Trap\n")


@pytest.fixture
def trapped(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a repository with changed files, a submodule of the same kind, and a ``git`` in its work tree."""
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "--quiet", "--initial-branch", "main")
    write(inner, "part.py", "old")
    git(inner, "add", ".")
    git(inner, "commit", "--quiet", "--message", "first")
    git(repo, "submodule", "add", "--quiet", str(inner), "part")
    write(repo, "data.bin", "old")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "--message", "second")
    write(repo, "plain.txt", "added")
    git(repo, "add", "plain.txt")
    for root in (repo, repo / "part"):
        name_programs(root, tmp_path / "traps")
    for path in ("train.py", "data.bin", "part/part.py"):
        write(repo, path, "new")
    program(repo / "git")
    monkeypatch.chdir(repo)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}:")
    (tmp_path / "traps" / "ran").unlink(missing_ok=True)
    return repo


def test_no_program_that_a_repository_names_is_run_and_the_bytes_of_its_files_are_taken(
    trapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(trapped)
    assert [(copy / path).read_text() for path in ("train.py", "data.bin", "part/part.py")] == ["new"] * 3
    provenance = find_provenance(trapped, sys.executable)
    # The two, and the one that was added; a submodule counts once it is at another commit.
    assert (provenance.git or {})["modified"] == 3
    assert b"plain.txt" in provenance.difference
    assert b"train.py" not in provenance.difference
    assert not [*tmp_path.rglob("ran")]
    # The test can fail: git itself runs them, and so does a shell.
    monkeypatch.setenv("PATH", os.environ["PATH"].strip(".:"))
    subprocess.run(["git", "diff"], cwd=trapped, capture_output=True, check=False)
    ran = (tmp_path / "traps" / "ran").read_text()
    assert "core.fsmonitor" in ran
    assert "filter-" in ran


def test_what_git_lfs_keeps_does_not_count_as_modified(repo: Path) -> None:
    write(repo, "model.bin", "version https://git-lfs.github.com/spec/v1\n")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "--message", "second")
    write(repo, ".git/info/attributes", "*.bin filter=lfs\n")
    write(repo, "model.bin", "large")
    assert (find_provenance(repo, sys.executable).git or {})["modified"] == 0
