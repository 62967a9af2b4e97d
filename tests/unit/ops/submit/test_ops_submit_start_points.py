"""Runs that begin with a checkpoint of another run: which one, and what of it is theirs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.saved_runs import copy_run, cut
from helpers.workspaces import submit

import slurmtrain
from slurmtrain.errors import NoCheckpoint, RunNotFound, SpecError, UserError
from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.ops.delete import delete, find_deletable
from slurmtrain.ops.prune import prune
from slurmtrain.ops.rerun import rerun
from slurmtrain.ops.resume import is_without_checkpoint, resume
from slurmtrain.ops.shared.observe import observe, observe_run
from slurmtrain.ops.shared.run_details import checkpoints_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.chained_runs import start_overrides
from slurmtrain.runtime.checkpoint import checkpoint_files as checkpoint_files
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.specfile import replan

pytestmark = pytest.mark.usefixtures("slurm")


@pytest.fixture
def parent(workspace: Workspace, saved_runs: Path) -> RunDir:
    """A run that has ended, with the checkpoints of steps 10 to 40."""
    return copy_run(saved_runs / "ended", workspace)


def submitted(workspace: Workspace, spec: Path, start_from: str) -> list[RunDir]:
    run_ids, _, _ = submit(workspace, spec, [f"start_from={start_from}"], executor="slurm")
    return [workspace.root.run(run_id) for run_id in run_ids]


@pytest.mark.parametrize(("word", "step"), [("", 40), (":20", 20)])
def test_a_run_begins_with_links_to_the_newest_checkpoint_or_to_that_of_a_step(
    workspace: Workspace, spec: Path, parent: RunDir, word: str, step: int
) -> None:
    [child] = submitted(workspace, spec, f"{parent.id[:-1]}{word}")
    plan = read_plan(child.plan)
    assert (plan.spec.start_from.run, plan.spec.start_from.step) == (parent.id, step)
    [start] = child.start.iterdir()
    source = parent.checkpoints / f"step-{step}"
    assert start.name == source.name
    assert {path.name: path.stat().st_ino for path in start.iterdir()} == {
        path.name: path.stat().st_ino for path in source.iterdir()
    }
    assert checkpoint_files.start_point(child) == start
    shutil.rmtree(parent.checkpoints)
    assert (start / MANIFEST).read_bytes()


def test_all_runs_of_a_sweep_begin_with_it_each_with_its_own_copy_where_there_are_no_links(
    workspace: Workspace, spec: Path, parent: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refuse)
        run_ids, _, _ = submit(workspace, spec, [f"start_from={parent.id}:30"], ["params.a=1,2"], executor="slurm")
    for run_id in run_ids:
        files = {path.name: path.read_bytes() for path in (workspace.root.run(run_id).start / "step-30").iterdir()}
        assert files == {path.name: path.read_bytes() for path in (parent.checkpoints / "step-30").iterdir()}


def test_programs_begin_runs_with_checkpoints_too(
    workspace: Workspace, spec: Path, parent: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmtrain.api.issue_warnings", lambda _: None)
    registry = slurmtrain.Registry(workspace.root.path)
    for start, weights_only, expected in (
        (registry.run(parent.id), False, (40, "everything")), (f"{parent.id}:20", True, (20, "weights"))
    ):  # fmt: skip
        [handle] = registry.submit(spec, from_=start, weights_only=weights_only, executor="slurm")
        plan = read_plan(workspace.root.run(handle.id).plan)
        assert (plan.spec.start_from.step, plan.spec.start_from.load) == expected
    with pytest.raises(UserError, match="weights_only needs from_"):
        registry.submit(spec, weights_only=True)


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("nobody", RunNotFound, "there is no run 'nobody'"),
        ("{id}:15", NoCheckpoint, r"no checkpoint of step 15; its steps are 10, 20, 30, 40"),
        ("{id}:best", UserError, "has no 'checkpoint.keep.best', so"),
    ],
)
def test_what_no_run_can_begin_with_is_refused_and_nothing_is_created(
    workspace: Workspace, spec: Path, parent: RunDir, word: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        submitted(workspace, spec, word.format(id=parent.id))
    assert workspace.run_ids() == [parent.id]


@pytest.mark.parametrize(
    ("word", "message"), [("", "expected run, found a blank text"), ("6:20", "there is no run '6'")]
)
def test_what_from_names_is_text_whatever_yaml_would_read(
    workspace: Workspace, spec: Path, word: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        submit(workspace, spec, start_overrides(word, weights_only=False), executor="slurm")
    with pytest.raises(UserError):
        submit(workspace, spec, start_overrides(word, weights_only=True), executor="slurm")
    assert workspace.run_ids() == []


def test_commands_say_which_runs_have_copies_of_the_checkpoints_that_they_list_or_delete(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    [child] = submitted(workspace, spec, f"{parent.id}:20")
    # As every command does first.
    observe(workspace, ask_slurm=False)
    listed = checkpoints_json(workspace, observe_run(workspace, parent.id, ask_slurm=False), deleted_too=False)
    assert {each["step"]: each["forks"] for each in listed["checkpoints"]}[20] == [child.id]
    pruned = prune(workspace, parent.id).to_dict()["pruned"]
    assert {each["step"]: each["forks"] for each in pruned} == {10: [], 20: [child.id]}
    # The child has not ended, and does not need its parent any more.
    deletable = find_deletable(workspace, [parent.id], forget=True)
    assert deletable[parent.id].forks == {20: [child.id]}
    assert parent.id in delete(workspace, deletable, forget=True).removed
    assert (child.start / "step-20" / MANIFEST).read_bytes()


def test_no_run_goes_back_to_a_damaged_checkpoint(workspace: Workspace, parent: RunDir) -> None:
    cut(parent.checkpoints / "step-20" / "__0_0.distcp")
    with pytest.raises(NoCheckpoint, match=r"cannot continue from step 20: .* bytes, but its manifest says"):
        resume(workspace, parent.id, step=20)
    assert sorted(path.name for path in parent.checkpoints.iterdir()) == ["step-10", "step-20", "step-30", "step-40"]


def test_a_script_that_has_not_saved_yet_resumes_from_what_its_run_began_with(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    spec.write_text(spec.read_text() + "checkpoint: {glob: out/*.pt}\n")
    [run_id], _, _ = submit(workspace, spec, executor="slurm")
    directory, run = workspace.root.run(run_id), observe_run(workspace, run_id, ask_slurm=False)
    plan = read_plan(directory.plan)
    assert plan is not None
    assert is_without_checkpoint(directory, run, plan)
    (directory.start / "step-5.pt").mkdir(parents=True)
    assert not is_without_checkpoint(directory, run, plan)


def test_a_damaged_checkpoint_and_one_that_is_pruned_meanwhile_leave_nothing(
    workspace: Workspace, spec: Path, parent: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(parent.checkpoints / "step-40" / "__0_0.distcp")
    with pytest.raises(NoCheckpoint, match=r"step-40: .* bytes, but its manifest says"):
        submitted(workspace, spec, parent.id)
    link = os.link

    def prune_first(source: Path, target: Path, **more: bool) -> None:
        shutil.rmtree(parent.checkpoints / "step-30", ignore_errors=True)
        link(source, target, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", prune_first)
        with pytest.raises(NoCheckpoint, match="step-30 was deleted a moment ago"):
            submitted(workspace, spec, f"{parent.id}:30")
    assert workspace.run_ids() == [parent.id]
    assert [path.name for path in workspace.root.path.glob(".new-*")] == []


def test_a_script_that_finds_its_own_checkpoints_cannot_begin_with_one_of_a_session(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    spec.write_text(spec.read_text() + "checkpoint: {glob: out/*.pt}\n")
    with pytest.raises(UserError, match=r"this spec has 'checkpoint\.glob'"):
        submitted(workspace, spec, parent.id)


def test_a_fork_is_repeated_from_its_own_copy_after_its_parent_has_pruned_the_checkpoint(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    [child] = submitted(workspace, spec, f"{parent.id}:20")
    shutil.rmtree(parent.checkpoints / "step-20")
    [again] = rerun(workspace, child.id).run_ids
    assert (workspace.root.run(again).start / "step-20" / MANIFEST).samefile(child.start / "step-20" / MANIFEST)
    assert [parent["relation"] for parent in observe_run(workspace, again, ask_slurm=False).parents] == [
        "rerun",
        "fork",
    ]


def test_a_rerun_begins_with_what_the_run_has_begun_with_unless_it_names_something_else(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    [child] = submitted(workspace, spec, f"{parent.id}:20")
    prune(workspace, parent.id)
    observe(workspace, ask_slurm=False)

    def start(*overrides: str) -> list[str]:
        [run_id] = rerun(workspace, child.id, overrides).run_ids
        return [path.name for path in workspace.root.run(run_id).start.glob("*")]

    assert start() == ["step-20"]
    assert start(f"start_from={parent.id}:40") == ["step-40"]
    assert start("start_from=null") == []
    with pytest.raises(SpecError, match="start_from: the checkpoint that a run began with cannot be changed"):
        replan(read_plan(child.plan) or pytest.fail("no plan"), ["start_from=null"])


def test_a_rerun_of_a_run_that_waited_for_its_checkpoint_begins_with_the_same(
    workspace: Workspace, spec: Path, parent: RunDir
) -> None:
    [run_id], _, _ = submit(
        workspace, spec, [f"start_from={parent.id}", f"after=['afterany:{parent.id}']"], executor="slurm"
    )
    first = workspace.root.run(run_id)
    assert not list(first.start.glob("*"))
    # As its first attempt does.
    checkpoint_files.link_checkpoint(parent.checkpoints / "step-30", first)
    [run_id] = rerun(workspace, first.id).run_ids
    assert [path.name for path in workspace.root.run(run_id).start.iterdir()] == ["step-30"]
