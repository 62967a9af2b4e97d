"""Comparing the last checkpoints of two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import end_run, make_checkpoints, make_run, small_objects

from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.differences import _differing_paths, compare_checkpoints


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


def two_plain_runs(workspace: Workspace, tmp_path: Path, save: Callable[[Path, int], None]) -> tuple[Run, Run]:
    """Two runs whose script saves by itself: ``save`` gets the directory and the number of the run, 0 or 1."""
    runs = []
    for index in range(2):
        run = make_run(tmp_path / f"made-{index}", glob="{checkpoint_dir}/ckpt-*")
        target = workspace.root.run(f"0123456{index}89")
        target.path.parent.mkdir(exist_ok=True)
        run.path.rename(target.path)
        target.checkpoints.mkdir(exist_ok=True)
        save(target.checkpoints, index)
        runs.append(observe_run(workspace, target.id, ask_slurm=False))
    return runs[0], runs[1]


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_checkpoints_of_an_unknown_format_are_compared_by_file(
    workspace: Workspace, tmp_path: Path, text: str, identical: bool
) -> None:
    def save(directory: Path, index: int) -> None:
        (directory / "ckpt-5").mkdir()
        (directory / "ckpt-5" / "weights").write_text(text if index else "same")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert (comparison.identical, comparison.method) == (identical, "files")


@pytest.mark.parametrize(("change", "identical"), [(0.0, True), (0.5, False)])
def test_files_of_torch_are_compared_by_tensor_without_the_paths_in_them(
    workspace: Workspace, tmp_path: Path, change: float, identical: bool
) -> None:
    def save(directory: Path, index: int) -> None:
        weights = torch.ones(4)
        weights[2] += index * change
        torch.save({"step": 5, "weights": weights, "path": str(directory)}, directory / "ckpt-5.pt")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert (comparison.identical, comparison.method) == (identical, "tensors")
    assert (comparison.where, comparison.max_abs) == (("", None) if identical else ("weights", 0.5))


def test_values_that_are_no_tensors_may_differ_in_checkpoints_of_a_trainer(
    workspace: Workspace, tmp_path: Path
) -> None:
    def save(directory: Path, index: int) -> None:
        torch.save({"step": 5, "weights": torch.ones(4), "calls": index}, directory / "ckpt-5.pt")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert (comparison.identical, comparison.others) == (True, ("calls",))
    assert comparison.describe() == "is bit-identical, except for calls, which are no tensors"


def test_a_checkpoint_with_whole_objects_cannot_be_compared(workspace: Workspace, tmp_path: Path) -> None:
    def save(directory: Path, _: int) -> None:
        torch.save({"step": 5, "model": torch.nn.Linear(2, 2)}, directory / "ckpt-5.pt")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert comparison.identical is None
    assert comparison.why.startswith("no tensor in them can be read safely")


def test_a_difference_in_the_objects_of_a_rank_is_given_with_its_path() -> None:
    state = {"cursor": [1, float("nan")], "mean": torch.zeros(2)}
    assert list(_differing_paths(state, {"cursor": [1, float("nan")], "mean": torch.zeros(2)}, "x")) == []
    assert list(_differing_paths(state, {"cursor": [2, float("nan")], "mean": torch.ones(2)}, "x")) == [
        "x.cursor.0",
        "x.mean",
    ]
