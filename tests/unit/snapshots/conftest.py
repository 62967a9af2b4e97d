"""What tests of snapshots share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.repositories import git, write


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with a committed script."""
    root = tmp_path / "home" / "repo"
    root.mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    write(root, "train.py", "old")
    write(root, ".gitignore", "ignored/\n*.so\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root
