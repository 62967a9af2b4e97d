"""What a run is submitted from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slurmtrain.ops.submit.provenance import find_provenance


def git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    command = ["git", "-C", str(place), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_run_has_the_revision_the_branch_and_the_changes_of_its_code_without_secrets(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch", "wider")
    script = tmp_path / "train.py"
    script.write_text("width = 64\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    clean = find_provenance(tmp_path, sys.executable)
    assert (clean.git, clean.difference) == (
        {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False, "modified": 0, "branch": "wider"},
        b"",
    )
    script.write_text('width = 128\napi_key = "abcdefgh"\n')
    changed = find_provenance(tmp_path, sys.executable)
    assert changed.git == {**(clean.git or {}), "dirty": True, "modified": 1}
    assert b'-width = 64\n+width = 128\n+api_key = "<redacted>"\n' in changed.difference
    assert find_provenance(Path("/"), sys.executable).git is None


def test_a_run_has_the_packages_of_the_python_that_it_starts() -> None:
    lines = find_provenance(Path("/"), sys.executable).environment.decode().splitlines()
    version = ".".join(map(str, sys.version_info[:2]))
    assert lines[0].startswith(f"# {sys.executable}, Python {version}")
    assert any(line.startswith("SQLAlchemy==") or line.startswith("sqlalchemy==") for line in lines)
    assert (
        find_provenance(Path("/"), "/nowhere/bin/python").environment
        == b"# /nowhere/bin/python, Python of an unknown version\n"
    )
