"""Models of which each rank has a part: pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Attempt, Pair, alone
from torch import nn

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest
from slurmtrain.runtime.job.process_group import RankGroup

LAYERS = 4
WIDTH = 4


class Layers(nn.Module):
    """Some of the layers of a model, with their names in the whole model; a buffer that is no dense tensor too."""

    def __init__(self, numbers: Sequence[int], seed: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(100 * seed + number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)
            sparse = torch.eye(2).mul(seed * number + 1).to_sparse()
            self.layers[str(number)].register_buffer("mask", sparse)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            batch = torch.tanh(layer(batch))
        return batch


def make(numbers: Sequence[int], seed: int = 1) -> dict[str, Any]:
    """A part of the model with these layers, its optimizer with two groups, and a scheduler."""
    model = Layers(numbers, seed)
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "lr": 0.01 * seed},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim == 1], "lr": 0.02 * seed},
    ]
    optimizer = torch.optim.AdamW(groups)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def step(objects: dict[str, Any]) -> None:
    """A step that needs no other stage."""
    objects["model"](torch.ones(2, WIDTH)).square().mean().backward()
    objects["optimizer"].step()
    objects["scheduler"].step()


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    """What must come back, by the names in the whole model."""
    model, optimizer = objects["model"], objects["optimizer"]
    state = {name: value.to_dense().tolist() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name}.{key}"] = value.tolist()
        [group] = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
        state[f"{name}.lr"] = [group["lr"], group["initial_lr"]]
    return state


def part_of(ranks: RankGroup, parts: int) -> range:
    """The layers of this rank, if there are as many parts, each on one or more ranks."""
    per_part = LAYERS // parts
    part = ranks.rank // (ranks.world_size // parts)
    return range(part * per_part, (part + 1) * per_part)


def save(ranks: RankGroup, root: Path, parts: int) -> dict[str, Any]:
    objects = make(part_of(ranks, parts))
    with Attempt(root, ranks, objects) as attempt:
        for number in (1, 2):
            step(objects)
            assert attempt.save(number) == ""
    return state_of(objects)


def restore(ranks: RankGroup, root: Path, parts: int, again: bool = False) -> dict[str, Any]:
    objects = make(part_of(ranks, parts), seed=2)
    step(objects)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.step == 2
        state = state_of(objects)
        if again:
            # A stage that goes on saves again.
            step(objects)
            assert attempt.save(3) == ""
    return state


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for state in states for name, value in state.items()}


@pytest.mark.parametrize("parts", [2, 1])
def test_what_two_stages_have_saved_as_many_and_the_whole_model_restore(tmp_path: Path, pair: Pair, parts: int) -> None:
    saved = pair.run(save, tmp_path, 2)
    if parts == 2:
        assert pair.run(restore, tmp_path, 2, True) == saved
    else:
        assert restore(alone(), tmp_path, 1) == merged(saved)


def test_what_the_whole_model_has_saved_two_stages_restore(tmp_path: Path, pair: Pair) -> None:
    saved = save(alone(), tmp_path, 1)
    assert merged(pair.run(restore, tmp_path, 2)) == saved


def test_two_stages_become_four_and_those_two_with_two_replicas_each(tmp_path: Path, pair: Pair, four: Pair) -> None:
    saved = merged(pair.run(save, tmp_path / "two", 2))
    assert merged(four.run(restore, tmp_path / "two", 4)) == saved
    # Two stages, each on two ranks.
    replicated = four.run(save, tmp_path / "replicated", 2)
    assert replicated[0] == replicated[1] != replicated[2]
    assert four.run(restore, tmp_path / "replicated", 2) == replicated
    assert restore(alone(), tmp_path / "replicated", 1) == merged(replicated)


# --- names ------------------------------------------------------------------------------------------------------------


def refused(ranks: RankGroup, root: Path, case: str) -> str:
    """Why a save is refused."""
    torch.manual_seed(ranks.rank)
    model: nn.Module = nn.Sequential(nn.Linear(3, 3 if case != "shapes" else 3 + ranks.rank))
    objects: dict[str, Any] = {"model": model}
    if case == "kinds" and ranks.rank == 1:
        objects = {"model": torch.optim.SGD(model.parameters(), lr=0.1)}
    if case == "some":
        # Most names are those of the stage, but not all.
        model.add_module(f"own{ranks.rank}", nn.Linear(2, 2))
    with Attempt(root, ranks, objects) as attempt, pytest.raises(CheckpointError) as raised:
        attempt.save(1)
    return str(raised.value)


@pytest.mark.parametrize("case", ["values", "shapes", "some"])
def test_stages_with_the_same_names_for_different_tensors_are_refused_when_saving(
    tmp_path: Path, pair: Pair, case: str
) -> None:
    for problem in pair.run(refused, tmp_path, case):
        assert problem.startswith(
            "'model.0.weight' is not the same tensor on ranks 0 and 1: each trains a model of its own"
        )
        assert "run.parallelize(model), or DistributedDataParallel (DDP)" in problem


def test_one_name_for_objects_of_different_kinds_is_refused_when_saving(tmp_path: Path, pair: Pair) -> None:
    for problem in pair.run(refused, tmp_path, "kinds"):
        assert problem.startswith("'model' is registered as")


def test_replicas_that_have_drifted_apart_are_saved(tmp_path: Path, pair: Pair) -> None:
    assert pair.run(save_drifted, tmp_path) == ["", ""]


def save_drifted(ranks: RankGroup, root: Path) -> str:
    """Replicas with some noise, whose biases have nothing in common, and with buffers of their own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    torch.manual_seed(ranks.rank)
    with torch.no_grad():
        model[0].weight.add_(0.02 * torch.randn(8, 8))
        model[0].bias.copy_(torch.randn(8))
        model(torch.randn(4, 8))
    with Attempt(root, ranks, {"model": model}) as attempt:
        return attempt.save(1)


def make_stages(ranks: RankGroup, seed: int) -> dict[str, Any]:
    """Four stages of an interleaved schedule: rank 0 of two has stages 0 and 2, a single rank has all."""
    stages = {number: Layers([number], seed) for number in range(ranks.rank, LAYERS, ranks.world_size)}
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    return {"model": stages, "optimizer": torch.optim.AdamW(parameters)}


def go_through_stages(ranks: RankGroup, root: Path, seed: int) -> dict[str, Any]:
    """Save the stages, or restore them; what they are then, by their numbers."""
    objects = make_stages(ranks, seed)
    for stage in objects["model"].values():
        stage(torch.ones(2, WIDTH)).square().mean().backward()
    objects["optimizer"].step()
    with Attempt(root, ranks, objects, restart=seed) as attempt:
        assert attempt.save(1) == "" if seed == 1 else attempt.restore() is not None
    state = objects["optimizer"].state
    return {
        f"{number}.{name}": [parameter.tolist(), state[parameter]["exp_avg"].tolist()]
        for number, stage in objects["model"].items()
        for name, parameter in stage.named_parameters()
    }


def test_a_rank_may_have_several_stages(tmp_path: Path, pair: Pair) -> None:
    saved = pair.run(go_through_stages, tmp_path, 1)
    assert [sorted(name[0] for name in own)[0::2] for own in saved] == [["0", "2"], ["1", "3"]]
    assert pair.run(go_through_stages, tmp_path, 2) == saved
    assert go_through_stages(alone(), tmp_path, 3) == merged(saved)


def restore_misfit(ranks: RankGroup, root: Path) -> str:
    numbers = part_of(ranks, 2) if ranks.rank == 0 else range(2, 3)
    with (
        Attempt(root, ranks, {"model": Layers(numbers)}, restart=1) as attempt,
        pytest.raises(CheckpointError) as raised,
    ):
        attempt.restore()
    return str(raised.value)


def test_layers_that_no_rank_has_are_named_when_restoring(tmp_path: Path, pair: Pair) -> None:
    pair.run(save, tmp_path, 2)
    for problem in pair.run(restore_misfit, tmp_path):
        assert "'model.layers.3.weight' is not in the script" in problem
        assert "layers.2" not in problem


def save_stateless(ranks: RankGroup, root: Path) -> list[float]:
    """Optimizers without a state have options all the same: each stage its own."""
    rates = []
    for restart in (0, 1):
        model = Layers(part_of(ranks, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + ranks.rank if not restart else 9.0)
        with Attempt(root, ranks, {"model": model, "optimizer": optimizer}, restart=restart) as attempt:
            assert attempt.restore() is not None if restart else attempt.save(1) == ""
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def closure(model: nn.Module) -> float:
    model.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return float(loss)


def save_own_schedule(ranks: RankGroup, root: Path, same: bool) -> list[Any]:
    """A scheduler, and an optimizer whose states have no names, of each stage."""
    results = []
    for restart in (0, 1):
        torch.manual_seed(0 if same else ranks.rank)
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
        rate = 0.0 if same else float(ranks.rank)
        scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1.0 + rate), 0.5)
        if restart:
            scheduler.base_lrs = [9.0]
        else:
            optimizer.step(functools.partial(closure, model))
        objects = {"optimizer": optimizer, "scheduler": scheduler}
        with Attempt(root, ranks, objects, restart=restart) as attempt:
            assert attempt.restore() is not None if restart else attempt.save(1) == ""
        results.append(
            [scheduler.base_lrs, [value.tolist() for value in optimizer.state_dict()["state"][0]["old_dirs"]]]
        )
    return results


def test_what_has_no_names_is_saved_for_each_rank_if_it_differs(tmp_path: Path, pair: Pair) -> None:
    results = pair.run(save_own_schedule, tmp_path / "own", False)
    for saved, restored in results:
        assert restored == saved
    assert [saved[0] for saved, _ in results] == [[1.0], [2.0]]
    for saved, restored in pair.run(save_own_schedule, tmp_path / "same", True):
        assert restored == saved
    kinds = [read_manifest(tmp_path / case / "checkpoints" / "step-1").objects for case in ("own", "same")]
    assert [kind["scheduler"].get("split", False) for kind in kinds] == [True, False]


def test_each_stage_has_its_own_options(tmp_path: Path, pair: Pair) -> None:
    assert pair.run(save_stateless, tmp_path) == [[0.5, 0.5], [1.5, 1.5]]
    # As one group they cannot have both rates.
    model = Layers(range(LAYERS))
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    different = pytest.raises(CheckpointError, match="parameters of one group have different options")
    with Attempt(tmp_path, alone(), {"model": model, "optimizer": optimizer}, restart=2) as attempt, different:
        attempt.restore()
