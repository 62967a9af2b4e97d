"""The code of runs: their snapshots, and what is noted of where it comes from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.workspaces import make_workspace

from slurmtrain.errors import UserError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.ops.submit.code_snapshots import code_sources, find_provenance, with_snapshots
from slurmtrain.snapshots import selection


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, in which commands are called."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return directory


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace next to the project."""
    made = make_workspace(tmp_path / "runs")
    made.prepare()
    yield made
    made.close()


def plans(tmp_path: Path, **keys: Any) -> list[Any]:
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "command": "python train.py", **keys}))
    return [planned.plan for planned in load(path, (), ()).runs]


def test_by_default_a_submission_has_a_snapshot(project: Path, workspace: Workspace, tmp_path: Path) -> None:
    [plan], notes = with_snapshots(workspace, plans(tmp_path))
    assert (plan.code.root, plan.code.files, notes) == (str(project), 1, [])


def test_without_a_project_runs_have_none_and_one_note_says_so(
    project: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    several, notes = with_snapshots(workspace, plans(tmp_path, sweep={"params.a": [1, 2]}, params={"a": 1}))
    assert [plan.code for plan in several] == [None, None]
    assert notes == [
        f"runs execute the code as it is when they start, without a snapshot: {project} is your home directory; set "
        "'workdir' to the directory of the code"
    ]


@pytest.mark.parametrize("limit", ["_MOST_FILES", "_MOST_BESIDE"])
def test_too_much_is_refused_only_where_a_snapshot_is_asked_for(
    project: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    (project / "weights.pt").touch()
    monkeypatch.setattr(selection, limit, 0)
    [plan], [note] = with_snapshots(workspace, plans(tmp_path))
    assert plan.code is None
    assert note.startswith("runs execute the code as it is when they start, without a snapshot: the")
    with pytest.raises(UserError, match="or set 'code: none' to run the code as it is when the job starts"):
        with_snapshots(workspace, plans(tmp_path, code="snapshot"))


def test_a_file_that_cannot_be_read_leaves_runs_without_a_snapshot(
    project: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmtrain.snapshots import snapshot_store

    def read(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", "secret")

    monkeypatch.setattr(snapshot_store, "hash_one", read)
    [plan], [note] = with_snapshots(workspace, plans(tmp_path))
    assert (plan.code, note.endswith(": secret: permission denied")) == (None, True)


def test_the_runs_of_a_sweep_share_a_snapshot_without_what_any_of_them_writes(
    project: Path, workspace: Workspace, tmp_path: Path
) -> None:
    for name in ("out-1", "out-2", "out-3"):
        (project / name).mkdir()
        (project / name / "log.txt").touch()
    swept = plans(
        tmp_path, command="python train.py --output-dir out-${params.a}", sweep={"params.a": [1, 2]}, params={"a": 1}
    )
    assert len(code_sources(swept)) == 1
    first, second = with_snapshots(workspace, swept)[0]
    assert first.code == second.code
    assert first.code.beside == {"": ["out-1", "out-2"]}


@pytest.mark.parametrize(
    ("command", "uses"),
    [
        ("true", False),
        ("sleep 5", False),
        ("hostname -f", False),
        ("ls train.py", True),
        ("bash run.sh", True),
        ("python -m http.server", True),
        ("make", True),
        ("./train.py", True),
        ("no-such-program", True),
    ],
)
def test_a_program_of_the_system_without_operands_needs_none(
    project: Path, tmp_path: Path, command: str, *, uses: bool
) -> None:
    assert bool(code_sources(plans(tmp_path, command=command))) is uses
    assert code_sources(plans(tmp_path, command=command, code="snapshot"))
    assert not code_sources(plans(tmp_path, command=command, code="none"))


def test_setup_and_commands_that_name_the_repository_as_it_is_by_then_are_pointed_out(
    project: Path, workspace: Workspace, tmp_path: Path
) -> None:
    setup = [f"source {project}/env.sh"]
    _, notes = with_snapshots(workspace, plans(tmp_path, setup=setup, command=f"bash -c 'python {project}/train.py'"))
    named = f"names {project}, and uses the files there when it runs, not the snapshot"
    assert notes == [f"'python {project}/train.py' in the command {named}", f"'{setup[0]}' in 'setup' {named}"]


def test_a_spec_is_no_code_since_secrets_may_be_in_it(project: Path, workspace: Workspace) -> None:
    (project / "base.yaml").write_text("env: {API_TOKEN: tok-4711}\n")
    (project / "exp.yaml").write_text("extends: base.yaml\ncommand: python train.py\n")
    spec = load(project / "exp.yaml", (), ())
    [plan], _ = with_snapshots(workspace, [planned.plan for planned in spec.runs], spec.files)
    assert (plan.code.files, plan.code.beside) == (1, {"": ["base.yaml", "exp.yaml"]})


# --- where it comes from ---------------------------------------------------------------------------------------------


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
