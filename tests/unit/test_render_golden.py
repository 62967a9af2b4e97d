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
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.render import Rendered, render
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import entrances
from slurmtrain.slurm.request import Elements, make_request

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
# Scripts of jobs that `render` has no run for: of a job array, of one of packs, and of a run that starts after others.
JOINED = ("array", "pack", "chain")


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a plan or a script takes from the machine, as it would be on one certain machine."""
    monkeypatch.setattr(Path, "cwd", classmethod(lambda _: PROJECT))
    monkeypatch.setattr(sys, "executable", "/opt/slurm train/bin/python3")
    monkeypatch.setattr(entrances, "which_python", lambda: "/usr/bin/python3")


def rendered(name: str) -> Rendered:
    runs = RUNS[name]
    workspace = Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None))
    [run] = render(workspace, GOLDEN / f"{name}.yaml", (), (), executor="slurm").runs
    return run


def joined(kind: str) -> str:
    """The batch script of a kind of job, made from a plan of the runs that it is for."""
    root, plan = RunsRoot(RUNS["one-node"]), rendered("one-node").plan
    array = root.array("ARRAY-ID")
    if kind == "array":
        return make_request(plan, array, Elements(4, at_once=2)).script
    if kind == "pack":
        return make_request(plan, array, Elements(2, pack=Pack(3))).script
    submission = root.run("RUN-ID").submission(2)
    return make_request(plan, submission, excluded_nodes=["node7"], singleton=True, after=["17", "18_1"]).script


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


@pytest.mark.parametrize("kind", JOINED)
def test_the_batch_script_of_several_runs_is_the_golden_one(kind: str) -> None:
    compare(GOLDEN / f"{kind}.sh", joined(kind))


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_plan_reads_back_with_its_hash(name: str) -> None:
    data = json.loads((GOLDEN / f"{name}.plan.json").read_text())
    plan = Plan.from_json(data)
    assert plan.to_json() == data
    assert plan.hash == data["hash"]


@pytest.mark.parametrize("name", [*RUNS, *JOINED])
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
    expected = {f"{name}{ending}" for name in RUNS for ending in endings} | {f"{kind}.sh" for kind in JOINED}
    assert {path.name for path in GOLDEN.iterdir() if path.name.endswith(endings)} == expected
