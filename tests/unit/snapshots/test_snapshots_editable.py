"""Packages that setuptools has installed as editable: a run imports its own copy of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.repositories import snapshot_of, write

from slurmtrain.runtime.code.packages import find_editable
from slurmtrain.runtime.code.tree import make_tree

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
