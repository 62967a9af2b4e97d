"""Submitting runs again: what is the same, what is noted, and what cannot be repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun

import slurmtrain
from slurmtrain.errors import PathError, RunNotFound, SlurmtrainWarning, SpecError, UserError
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.lineage import RERUN, Parent
from slurmtrain.ops.delete import delete, find_deletable
from slurmtrain.ops.rerun import plan_again, rerun
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.runtime.upstreams import read_upstreams
from slurmtrain.specfile import PlannedRun

Submitted = Callable[..., list[str]]


def again(
    workspace: Workspace, name: str, *overrides: str, code_of_now: bool = False
) -> tuple[list[PlannedRun], list[str]]:
    repetition = plan_again(workspace, name, overrides, code_of_now=code_of_now)
    assert repetition.executor == "slurm"
    return list(repetition.spec.runs), list(repetition.notes)


def test_the_same_plan_and_code_are_submitted_as_a_new_run(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    [first] = submitted("params.lr=0.2")
    (project / "train.py").unlink()
    (project / "spec.yaml").unlink()
    [second] = rerun(workspace, "digits").run_ids
    plans = [read_plan(workspace.root.run(each).plan) for each in (first, second)]
    assert plans[0] == plans[1]
    assert plans[0].code is not None
    assert (workspace.root.run(second).spec).read_text() == (workspace.root.run(first).spec).read_text()
    assert observe(workspace, ask_slurm=False).runs[second].row["parents"] is not None


def test_overrides_change_the_new_run_and_are_listed_after_those_of_the_old_one(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    [first] = submitted("params.lr=0.2")
    [planned], notes = again(workspace, first, "params.lr=0.5", "name=other", "seed=null")
    assert (planned.plan.spec.command, planned.plan.spec.name) == ("python train.py 0.5", "other")
    assert planned.overrides == ("params.lr=0.2", "params.lr=0.5", "name=other", "seed=null")
    assert planned.parents == (Parent(first, RERUN),)
    assert notes == []


def test_programs_submit_runs_again_too(workspace: Workspace, project: Path, submitted: Submitted) -> None:
    [first] = submitted()
    with pytest.warns(SlurmtrainWarning, match="this machine's own"):
        [handle] = slurmtrain.Registry(workspace.root.path).rerun(first, {"params.lr": 0.7})
    assert (handle.name, handle.params) == ("digits", {"lr": 0.7})


def test_a_sweep_is_repeated_as_a_whole_or_one_of_its_runs(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    ids = submitted(sweep=("params.lr=1,2,3",))
    sweep = observe(workspace, ask_slurm=False).runs[ids[0]].sweep
    assert sweep is not None
    planned, _ = again(workspace, sweep)
    assert [run.plan.spec.params["lr"] for run in planned] == [1, 2, 3]
    assert [run.varies for run in planned] == [{"params.lr": value} for value in (1, 2, 3)]
    assert [run.parents[0].run for run in planned] == ids
    packed = submitted(sweep=("params.lr=1,2,3,4", "parallel=2", "pack=2"))
    of_packed = observe(workspace, ask_slurm=False).runs[packed[0]].sweep
    assert of_packed is not None
    spec = plan_again(workspace, of_packed).spec
    assert (spec.parallel, spec.pack) == (2, Pack(2))
    with pytest.raises(UserError, match="that is no longer possible"):
        plan_again(workspace, of_packed, ["resources.nodes=2"])
    assert plan_again(workspace, packed[0]).spec.pack is None
    [alone], _ = again(workspace, ids[1])
    assert alone.plan.spec.params["lr"] == 2


def test_a_run_of_a_chain_is_repeated_after_the_same_runs_unless_others_are_named(
    workspace: Workspace, submitted: Submitted
) -> None:
    [upstream] = submitted(name="pretrain")
    [first] = submitted(after=["pretrain"])
    [newer] = submitted(name="pretrain")

    def after(*overrides: str) -> list[str]:
        [repeated] = rerun(workspace, first, overrides).run_ids
        return [each.run for each in read_upstreams(workspace.root.run(repeated))]

    assert after() == [upstream]
    # Also when it is called like what it starts after.
    assert after("name=pretrain") == [upstream]
    assert after(f"after=[{newer}]") == [newer]
    shutil.rmtree(workspace.root.run(upstream).path)
    with pytest.raises(UserError, match=rf"run {upstream} \(pretrain\) was deleted; 'rerun RUN after="):
        after()
    assert after("after=[]") == []


def test_a_file_that_only_the_snapshot_has_is_not_missing(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    (project / "small.yaml").write_text("x: 1\n")
    [first] = submitted(command="python train.py --config small.yaml")
    (project / "small.yaml").unlink()
    assert not [note for note in rerun(workspace, first).notes if "there is no" in note]


def test_what_cannot_be_the_same_is_noted_in_a_line_per_kind(
    workspace: Workspace, project: Path, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{os.defpath}")
    [first] = submitted(code="none", seed=None)
    listed = workspace.root.run(first).environment
    text = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(["# /gone/python, Python 3.1.4\n", *text[1:], "zzz==1.0\n"]))
    [planned], notes = again(workspace, first)
    assert planned.plan.code is None
    assert notes == [
        f"run {first} has no 'seed', so random numbers repeat only if its script seeds them",
        f"run {first} had Python 3.1.4; this run has {sys.version.split()[0]}",
        f"the packages differ from run {first}: zzz removed (was 1.0)",
        f"run {first} had no snapshot, so its code may have been different: no revision then, no revision now",
    ]
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"], check=True
    )
    assert "no revision then, " in again(workspace, first)[1][-1]
    [second] = submitted(code="none")
    assert again(workspace, second)[1] == []
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "b", "--allow-empty"], check=True
    )
    assert "may have been different: " in again(workspace, second)[1][0]


def test_a_run_whose_python_is_gone_takes_the_one_of_now(
    workspace: Workspace, project: Path, submitted: Submitted
) -> None:
    [first] = submitted()
    plan = workspace.root.run(first).submission(1).plan
    plan.write_text(plan.read_text().replace(f'"{sys.executable}"', '"/gone/bin/python"'))
    [planned], notes = again(workspace, first)
    assert planned.plan.python == sys.executable
    assert f"the Python of run {first}, /gone/bin/python, is gone; this run uses {sys.executable}" in notes


def test_a_run_whose_files_were_deleted_is_repeated_as_long_as_its_code_is_kept(
    workspace: Workspace, submitted: Submitted
) -> None:
    [first] = submitted()
    SimulatedRun(workspace.root.run(first), job="8", now=2_000_000_000.0).started().ended("completed")
    observe(workspace, ask_slurm=False)
    deletable = find_deletable(workspace, [first], forget=False)
    delete(workspace, deletable, forget=False)
    assert not workspace.root.run(first).checkpoints.exists()
    [planned], notes = again(workspace, first)
    assert planned.plan.spec.params == {"lr": 0.1}
    assert notes == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "no contents"])
def test_a_damaged_snapshot_is_refused_before_anything_is_created(
    workspace: Workspace, project: Path, submitted: Submitted, damage: str
) -> None:
    [first] = submitted()
    [snapshot] = (place for place in workspace.root.snapshots.iterdir() if place.is_dir())
    contents = snapshot / "contents.gz"
    if damage == "missing":
        snapshot.rename(snapshot.with_name("elsewhere"))
    elif damage == "no contents":
        contents.unlink()
    else:
        contents.chmod(0o600)
        contents.write_bytes(contents.read_bytes()[:12])
    with pytest.raises(PathError, match=r"snapshot .*; nothing was submitted; '--code now' uses the code as it is now"):
        rerun(workspace, first)
    assert len(observe(workspace, ask_slurm=False).runs) == 1
    (project / "train.py").write_text("new\n")
    [planned], notes = again(workspace, first, code_of_now=True)
    assert planned.plan.code is not None
    assert any("the current code, snapshot" in note for note in notes)


def test_what_cannot_be_repeated_is_refused(
    workspace: Workspace, project: Path, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunNotFound, match="there is no run 'nothing'"):
        rerun(workspace, "nothing")
    with pytest.raises(UserError, match="is a pattern"):
        rerun(workspace, "dig*")
    [first] = submitted(env={"API_TOKEN": "abc"})
    with pytest.raises(UserError, match="API_TOKEN"):
        rerun(workspace, first)
    monkeypatch.setenv("API_TOKEN", "abc")
    with pytest.raises(SpecError, match="did you mean"):
        rerun(workspace, first, ["params.lrr=1"])
    project.rename(project.with_name("moved"))
    monkeypatch.chdir(project.with_name("moved"))
    with pytest.raises(PathError, match=r"working directory .* does not exist"):
        rerun(workspace, first)
    plan = workspace.root.run(first).submission(1).plan
    plan.write_text(plan.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(PathError, match="schema 9"):
        rerun(workspace, first)
    assert len(observe(workspace, ask_slurm=False).runs) == 1
