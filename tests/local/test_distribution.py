"""What is published: the sdist, the wheel built from it, and slurmtrain installed from that, outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import packaging
import pytest
import yaml
from helpers.site import PROJECT
from packaging.metadata import Metadata
from packaging.version import Version

import slurmtrain

NAME = f"slurmtrain-{slurmtrain.__version__}"
# A rank says where it got slurmtrain from, and whether torch loaded the entry point that guards its data loaders.
SCRIPT = """
import json, sys, torch, slurmtrain

guarded = "slurmtrain.runtime.training.loader_guard" in sys.modules
with slurmtrain.session(params={"steps": 2}) as run:
    run.checkpoint(model=torch.nn.Linear(2, 2))
    for step in run.steps(2):
        run.log(loss=1.0)
print(json.dumps({"package": slurmtrain.__file__, "guarded": guarded}))
"""


def call(*command: str | Path, cwd: Path, path: str = os.environ["PATH"]) -> str:
    """What a command prints, in an environment without PYTHONPATH and settings of slurmtrain; it must succeed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURMTRAIN_", "MLFLOW_", "PYTHON"))}
    environ = {**inherited, "PATH": path, "XDG_CONFIG_HOME": str(cwd / "no-config")}
    completed = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def build(target: str, source: Path, into: Path) -> Path:
    """The sdist or the wheel of a source tree, built with the installed backend."""
    call(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into, cwd=source)
    [distribution] = into.iterdir()
    return distribution


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", PROJECT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", unpacked / NAME, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel installed, and, from the tests' own environment, what the wheel requires."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # Unlike in a site directory, no .pth file is read there: an editable installation does not stand in for the wheel.
    (packages / "dependencies.pth").write_text("\n".join(map(sysconfig.get_path, ("purelib", "platlib"))))
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    call(*pip, "install", "--no-index", "--no-deps", "--quiet", wheel, cwd=place)
    return place


def test_the_sdist_holds_what_builds_tests_and_documents_slurmtrain(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{NAME}/") for member in archive.getmembers()}
    needed = {"pyproject.toml", "LICENSE", "README.md", "SECURITY.md", "constraints.txt", "templates/batch.sh.j2"}
    needed |= {"slurmtrain/py.typed", "scripts/test", "tests/conftest.py", "tests/local/test_distribution.py"}
    assert needed - names == set()
    assert [name for name in names if name.startswith((".ci", ".git/", ".venv", "runs/"))] == []


def test_the_wheel_holds_the_package_its_templates_the_assets_of_pages_and_the_license_and_nothing_else(
    wheel: Path,
) -> None:
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        assert f"{NAME}.dist-info/licenses/LICENSE" in archive.namelist()
    package = {str(path.relative_to(PROJECT)) for path in PROJECT.glob("slurmtrain/**/*.py")}
    templates = {f"slurmtrain/{path.relative_to(PROJECT)}" for path in PROJECT.glob("templates/**/*") if path.is_file()}
    assets = {str(path.relative_to(PROJECT)) for path in PROJECT.glob("slurmtrain/plugins/report/assets/*")}
    assert assets
    assert names == package | templates | assets | {"slurmtrain/py.typed"}


@pytest.mark.skipif(
    Version(packaging.__version__).major < 26, reason="before 26, packaging does not know what hatchling writes"
)
def test_the_metadata_is_valid_and_that_of_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{NAME}.dist-info/METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert (metadata.name, str(metadata.version)) == ("slurmtrain", slurmtrain.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert "scripts/quickstart" in (metadata.description or "")
    assert metadata.requires_python is not None
    assert "3.10" not in metadata.requires_python
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert set(metadata.provides_extra or ()) == set(project["optional-dependencies"])


def test_what_the_wheel_requires_is_installed_here(installed: Path) -> None:
    call(sys.executable, "-m", "pip", "--python", installed / "bin" / "python", "check", cwd=installed)


def test_an_installed_slurmtrain_renders_and_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spec = {"name": "outside", "command": "python train.py", "tracking": {"mlflow": {"enabled": False}}}
    (tmp_path / "outside.yaml").write_text(yaml.safe_dump(spec))
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"
    program = installed / "bin" / "slurmtrain"
    assert "submit" in call(program, "--help", cwd=tmp_path, path=path)
    assert slurmtrain.__version__ in call(program, "--version", cwd=tmp_path, path=path)
    # From the templates.
    assert "# slurmtrain run RUN-ID" in call(program, "render", "outside.yaml", cwd=tmp_path, path=path)
    submitted = call(
        program, "submit", "outside.yaml", "--executor", "local", "--wait", "--json", cwd=tmp_path, path=path
    )
    [run] = json.loads(submitted)["runs"]
    assert run["state"] == "completed"
    [log] = Path(run["dir"]).glob("attempts/*/logs/rank-0.log")
    printed = json.loads(log.read_text().splitlines()[-1])
    assert Path(printed["package"]).is_relative_to(installed)
    assert printed["guarded"]
