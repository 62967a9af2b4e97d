"""Results under relative paths that a command names are where they are without a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.model.experiment.code import CodeSnapshot
from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.runtime.code.code_copy import link_results
from slurmtrain.system.inherited import private_umask


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The repository."""
    directory = tmp_path / "repo"
    (directory / "src").mkdir(parents=True)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a copy of the repository."""
    run = RunsRoot(tmp_path / "runs").run("abc")
    (run.code / "repo" / "src").mkdir(parents=True)
    return run


def plan(root: Path, options: str, glob: str | None = None) -> Plan:
    data = {"name": "n", "command": f"python train.py {options}", "checkpoint": {"glob": glob}}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    made, _ = make_plan(spec, workdir=str(root), python="/bin/python", template=data)
    code = CodeSnapshot(hash="0" * 64, root=str(root), files=1, bytes=1, beside={})
    object.__setattr__(made, "code", code)
    return made


def test_directories_are_made_beside_the_code_and_linked(
    root: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMTRAIN_UMASK", "0027")
    root.chmod(0o2755)
    for _ in range(2):
        with private_umask():
            link_results(plan(root, "--output-dir out/{run_id}/x --save-dir src/deep", "ckpts/*.pt"), run)
    copy = run.code / "repo"
    assert {path.name: path.readlink() for path in copy.iterdir() if path.is_symlink()} == {
        "out": root / "out",
        "ckpts": root / "ckpts",
    }
    assert (copy / "src/deep").readlink() == root / "src/deep"
    assert sorted(path.name for path in root.iterdir()) == ["ckpts", "out", "src"]
    # As if the script made it: for the group, which the directory hands down.
    assert (root / "out").stat().st_mode & 0o7777 == 0o2750


def test_what_may_be_a_file_or_a_directory_is_left_to_the_script(root: Path, run: RunDir) -> None:
    link_results(plan(root, "--save ckpts --out out/first"), run)
    assert [path.name for path in (run.code / "repo").iterdir()] == ["src", "out"]
    assert (run.code / "repo" / "out").readlink() == root / "out"
    assert list((root / "out").iterdir()) == []


def test_what_the_copy_has_stays_as_it_is(root: Path, run: RunDir) -> None:
    copy = run.code / "repo"
    (copy / "out").mkdir()
    (copy / "linked").symlink_to("/elsewhere")
    link_results(plan(root, "--output-dir out --save-dir linked/x"), run)
    assert (copy / "out").is_dir()
    assert not (copy / "out").is_symlink()
    assert (copy / "linked").readlink() == Path("/elsewhere")
    assert [path.name for path in root.iterdir()] == ["src"]


def test_where_nothing_can_be_made_beside_the_code_results_stay_in_the_copy(root: Path, run: RunDir) -> None:
    link_results(plan(root, "--output-dir ../no/such/place"), run)
    (root.parent / "no").rmdir()
    (root.parent / "no").write_text("a file")
    (run.code / "no").unlink()
    link_results(plan(root, "--output-dir ../no/place"), run)
    assert not (run.code / "no").exists()
