"""Plans and batch scripts, byte for byte. ``UPDATE_GOLDEN=1`` writes the files of tests/golden anew."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.config import Config
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.render import Rendered, render
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import specs

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# Directories that exist on no machine, so that nothing resolves to something else.
PROJECT = Path("/slurmtrain-golden/project")
RUNS = {
    "one-node": PROJECT / "runs",
    "four-nodes": PROJECT / "runs",
    "components": PROJECT / "runs",
    "setup-lines": PROJECT / "runs",
    "odd-characters": Path('/slurmtrain-golden/runs of it\'s "odd" $HOME `x` ünï;&'),
}


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a plan or a script takes from the machine, as it would be on one certain machine."""
    monkeypatch.setattr(Path, "cwd", classmethod(lambda _: PROJECT))
    monkeypatch.setattr(sys, "executable", "/opt/slurm train/bin/python3")
    monkeypatch.setattr(specs, "which_python", lambda: "/usr/bin/python3")


def rendered(name: str) -> Rendered:
    runs = RUNS[name]
    workspace = Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None))
    [run] = render(workspace, GOLDEN / f"{name}.yaml", (), (), executor="slurm").runs
    return run


def compare(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    golden = path.read_text()
    difference = "".join(
        difflib.unified_diff(
            golden.splitlines(keepends=True), text.splitlines(keepends=True), path.name, "rendered now"
        )
    )
    assert text == golden, f"UPDATE_GOLDEN=1 writes the file anew if this is meant:\n{difference}"


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_is_the_golden_one(name: str) -> None:
    compare(
        GOLDEN / f"{name}.plan.json", json.dumps(rendered(name).plan.to_json(), indent=2, ensure_ascii=False) + "\n"
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_batch_script_is_the_golden_one(name: str) -> None:
    compare(GOLDEN / f"{name}.sh", rendered(name).script)


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_plan_reads_back_with_its_hash(name: str) -> None:
    data = json.loads((GOLDEN / f"{name}.plan.json").read_text())
    plan = Plan.from_json(data)
    assert plan.to_json() == data
    assert plan.hash == data["hash"]


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_script_is_valid_shell_with_its_options_first(name: str) -> None:
    script = (GOLDEN / f"{name}.sh").read_text()
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    after = script[script.index(commands[0]) :]
    # sbatch reads options only before the first command.
    assert "#SBATCH" not in after
    assert script.startswith("#!/bin/bash\n")


def test_no_golden_file_holds_a_secret() -> None:
    for path in GOLDEN.glob("*.*"):
        if path.suffix in (".json", ".sh"):
            assert "must not be seen" not in path.read_text(), path.name


def test_every_golden_file_belongs_to_a_case() -> None:
    endings = (".yaml", ".plan.json", ".sh")
    expected = {f"{name}{ending}" for name in RUNS for ending in endings}
    assert {path.name for path in GOLDEN.iterdir() if path.name.endswith(endings)} == expected
