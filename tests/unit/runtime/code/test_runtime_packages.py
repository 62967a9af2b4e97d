"""The packages of a Python, read from the files of installers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from slurmtrain.model.environment import Package
from slurmtrain.runtime.code.packages import read_software, revision_of


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a virtual environment that has only what a test puts there."""
    packages = tmp_path / "venv/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.4\n")
    for name, record in {"torch-2.13.0": "torch/a.py,sha256=x,1\n", "numpy-2.1": None}.items():
        (packages / f"{name}.dist-info").mkdir()
        if record is not None:
            (packages / f"{name}.dist-info/RECORD").write_text(record)
    return tmp_path / "venv/bin/python"


def test_packages_have_versions_and_the_hash_of_the_list_of_their_files(python: Path) -> None:
    software = read_software(python)
    assert (software.python, software.version) == (str(python), "3.12.4")
    assert software.packages["numpy"] == Package("2.1")
    assert len(software.packages["torch"].detail) == 16
    record = python.parent.parent / "lib/python3.12/site-packages/torch-2.13.0.dist-info/RECORD"
    record.write_text("torch/a.py,sha256=y,1\n")
    assert read_software(python).packages["torch"].detail != software.packages["torch"].detail


def test_an_editable_package_has_its_directory_and_revision(python: Path, tmp_path: Path) -> None:
    source = tmp_path / "the source"
    for command in (["init", "-q", str(source)], ["-C", str(source), *_AS, "commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    installed = python.parent.parent / "lib/python3.12/site-packages/mine-0.1.dist-info"
    installed.mkdir()
    (installed / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    assert read_software(python).packages["mine"] == Package("0.1", f"editable {source}, {commit[:12]}")
    subprocess.run(["git", "-C", str(source), "pack-refs", "--all"], check=True)
    (source / "deep").mkdir()
    assert revision_of(source / "deep") == commit.strip()
    subprocess.run(["git", "-C", str(source), "worktree", "add", "-q", str(tmp_path / "tree")], check=True)
    assert revision_of(tmp_path / "tree") == commit.strip()
    assert revision_of(tmp_path) == ""


_AS = ("-c", "user.name=a", "-c", "user.email=a@b")


def test_damaged_files_of_installers_are_passed_over(python: Path) -> None:
    installed = python.parent.parent / "lib/python3.12/site-packages/torch-2.13.0.dist-info"
    (installed / "direct_url.json").write_text("{")
    assert read_software(python).packages["torch"] == Package("2.13.0")
    assert read_software(Path("/nowhere/bin/python")).packages == {}


def test_the_packages_of_this_python_are_those_that_it_knows_itself() -> None:
    packages = read_software(Path(sys.executable)).packages
    assert packages["torch"].version == metadata.version("torch")
    assert packages["click"].detail
