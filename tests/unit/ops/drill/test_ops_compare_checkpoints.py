"""Comparing the last checkpoints of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import end_run, make_checkpoints, make_run, small_objects

from slurmtrain.model.run.run import Run
from slurmtrain.ops.drill.compare_checkpoints import _differing, compare_checkpoints
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace


def two_runs(workspace: Workspace, tmp_path: Path, change: float = 0.0, step: int = 10) -> tuple[Run, Run]:
    """Two runs that have saved the same model; the second with one weight that differs by ``change``."""
    torch.manual_seed(5)
    objects = small_objects()
    runs = []
    for index in range(2):
        run = make_run(tmp_path / f"made-{index}")
        target = workspace.root.run(f"0123456{index}89")
        target.path.parent.mkdir(exist_ok=True)
        run.path.rename(target.path)
        if index:
            with torch.no_grad():
                objects["model"][0].weight[1, 2] += change
        make_checkpoints(target, [step if index else 10], objects=objects, at_step=lambda *_: None)
        end_run(target, "completed")
        runs.append(observe_run(workspace, target.id, ask_slurm=False))
    return runs[0], runs[1]


def test_equal_checkpoints_are_identical_though_their_random_states_differ(
    workspace: Workspace, tmp_path: Path
) -> None:
    import random

    first, second = two_runs(workspace, tmp_path)
    random.seed()
    comparison = compare_checkpoints(workspace, first, second)
    assert (comparison.identical, comparison.difference) == (True, None)


def test_the_largest_difference_is_given_with_its_place(workspace: Workspace, tmp_path: Path) -> None:
    first, second = two_runs(workspace, tmp_path, change=1e-3)
    comparison = compare_checkpoints(workspace, first, second)
    assert (comparison.identical, comparison.method, comparison.where) == (False, "values", "model.0.weight")
    assert comparison.difference is not None
    assert 0 < comparison.difference < 0.1
    assert comparison.max_abs == pytest.approx(1e-3, rel=1e-3)
    assert [each.name for each in comparison.differing] == ["model.0.weight"]


def test_checkpoints_of_other_steps_are_not_compared(workspace: Workspace, tmp_path: Path) -> None:
    comparison = compare_checkpoints(workspace, *two_runs(workspace, tmp_path, step=11))
    assert (comparison.identical, comparison.why) == (None, "they are of steps 10 and 11")
    assert comparison.steps == (10, 11)


def test_a_run_without_a_checkpoint_cannot_be_compared(workspace: Workspace, tmp_path: Path) -> None:
    first, second = two_runs(workspace, tmp_path)
    for path in workspace.root.run(second.id).checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    comparison = compare_checkpoints(workspace, first, second)
    assert comparison.identical is None
    assert "has left no checkpoint" in comparison.why


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_checkpoints_that_a_script_saves_by_itself_are_compared_by_file(
    workspace: Workspace, tmp_path: Path, text: str, identical: bool
) -> None:
    runs = []
    for index, weights in enumerate(("same", text)):
        run = make_run(tmp_path / f"made-{index}", glob="{checkpoint_dir}/ckpt-*")
        target = workspace.root.run(f"0123456{index}89")
        target.path.parent.mkdir(exist_ok=True)
        run.path.rename(target.path)
        (target.checkpoints / "ckpt-5").mkdir()
        (target.checkpoints / "ckpt-5" / "weights").write_text(weights)
        runs.append(observe_run(workspace, target.id, ask_slurm=False))
    comparison = compare_checkpoints(workspace, *runs)
    assert (comparison.identical, comparison.method) == (identical, "files")


def test_a_difference_in_the_objects_of_a_rank_is_given_with_its_path() -> None:
    state = {"cursor": [1, float("nan")], "mean": torch.zeros(2)}
    assert list(_differing(state, {"cursor": [1, float("nan")], "mean": torch.zeros(2)}, "x")) == []
    assert list(_differing(state, {"cursor": [2, float("nan")], "mean": torch.ones(2)}, "x")) == [
        "x.cursor.0",
        "x.mean",
    ]
