"""ZeroRedundancyOptimizer: each rank has the optimizer state of some of the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import drawn, rare
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.job.process_group import RankGroup

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer_class": torch.optim.AdamW, "weight_decay": 0.1},
    "momentum": {"optimizer_class": torch.optim.SGD, "momentum": 0.9},
    "plain_sgd": {"optimizer_class": torch.optim.SGD},
    "as_buckets": {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True},
}
BATCH = 8


def make(kind: str, *, zero: bool = True, seed: int = 1) -> dict[str, Any]:
    """A model, its optimizer with two groups, and a scheduler, which differ in every value with the ``seed``."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    options = dict(KINDS[kind])
    optimizer_class = options.pop("optimizer_class")
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "lr": 0.1 * seed}, {"params": biases, "lr": 0.01 * seed}]
    if zero:
        model = DistributedDataParallel(model)
        optimizer: Any = ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_class, lr=0.1, **options)
    else:
        options.pop("parameters_as_bucket_view", None)
        optimizer = optimizer_class(groups, lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(ranks: RankGroup, objects: dict[str, Any], first: int, last: int) -> None:
    for step in range(first, last):
        batch = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        share = batch.tensor_split(ranks.world_size)[ranks.rank]
        objects["optimizer"].zero_grad()
        objects["model"](share).square().mean().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()


def state_of(ranks: RankGroup, objects: dict[str, Any]) -> dict[str, Any]:
    """Everything that must come back, of all ranks together."""
    model, optimizer = objects["model"], objects["optimizer"]
    module = model.module if isinstance(model, DistributedDataParallel) else model
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    own = {
        f"{names[id(parameter)]}.{key}": value.tolist()
        for parameter, state in inner.state.items()
        for key, value in state.items()
        if value is not None
    }
    return {
        "parameters": {name: value.tolist() for name, value in module.state_dict().items()},
        "states": {key: value for states in ranks.gather(own) for key, value in states.items()},
        "groups": [[group["lr"], group["initial_lr"]] for group in optimizer.param_groups],
        "scheduler": [objects["scheduler"].last_epoch, objects["scheduler"].get_last_lr()],
    }


def save(ranks: RankGroup, root: Path, kind: str, zero: bool = True) -> dict[str, Any]:
    objects = make(kind, zero=zero)
    train(ranks, objects, 0, 3)
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(3) == ""
    return state_of(ranks, objects)


def restore(ranks: RankGroup, root: Path, kind: str, zero: bool = True) -> dict[str, Any]:
    objects = make(kind, zero=zero, seed=2)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        assert attempt.restore() is not None
        restored = state_of(ranks, objects)
    # It can go on, and the next steps use the restored rates.
    train(ranks, objects, 3, 4)
    return restored


def interrupted(ranks: RankGroup, root: Path, kind: str) -> list[dict[str, Any]]:
    """The end of a run without and with an interruption after its third step."""
    objects = make(kind)
    train(ranks, objects, 0, 6)
    ends = [state_of(ranks, objects)]
    save(ranks, root, kind)
    objects = make(kind, seed=2)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        attempt.restore()
        train(ranks, objects, 3, 6)
        # A second save, of a state that has been restored.
        assert attempt.save(6) == ""
    return [*ends, state_of(ranks, objects)]


@pytest.mark.parametrize("kind", drawn([*KINDS], 2))
def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path, pair: Pair, kind: str) -> None:
    for undisturbed, resumed in pair.run(interrupted, tmp_path, kind):
        assert resumed == undisturbed
        assert bool(undisturbed["states"]) == (kind != "plain_sgd")


@pytest.mark.parametrize("kind", ["adamw", pytest.param("momentum", marks=rare)])
def test_what_two_ranks_have_saved_four_and_one_without_it_restore(
    tmp_path: Path, pair: Pair, four: Pair, kind: str
) -> None:
    [saved, _] = pair.run(save, tmp_path, kind)
    assert len(saved["states"]) == {"adamw": 12, "momentum": 4}[kind]
    assert four.run(restore, tmp_path, kind) == [saved] * 4
    assert restore(alone(), tmp_path, kind, zero=False) == saved


@pytest.mark.parametrize("kind", ["plain_sgd", pytest.param("adamw", marks=rare)])
def test_what_a_plain_optimizer_has_saved_it_restores(tmp_path: Path, pair: Pair, kind: str) -> None:
    saved = save(alone(), tmp_path, kind, zero=False)
    assert pair.run(restore, tmp_path, kind) == [saved] * 2


def share_few(ranks: RankGroup, root: Path) -> list[int]:
    """How many states each rank has after a restore, if there are fewer parameters than ranks."""
    counts = []
    for restart in (0, 1):
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
        with Attempt(root, ranks, {"model": model, "optimizer": optimizer}, restart=restart) as attempt:
            if restart:
                assert attempt.restore() is not None
                counts.append(len(optimizer.optim.state))
            else:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                assert attempt.objects.have_begun()
                assert attempt.save(1) == ""
    return counts


def test_ranks_without_a_parameter_have_no_state(tmp_path: Path, four: Pair) -> None:
    assert sum(count for [count] in four.run(share_few, tmp_path)) == 2


def refused(ranks: RankGroup, root: Path) -> list[str]:
    model = nn.Linear(2, 2)
    overlapping = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    other = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    problems = []
    for optimizer in (overlapping, other):
        with pytest.raises(TypeError) as raised:
            Attempt(root, ranks, {"model": model, "optimizer": optimizer})
        problems.append(str(raised.value))
    return problems


def test_what_could_not_be_restored_is_refused_when_it_is_registered(tmp_path: Path, pair: Pair) -> None:
    for overlapping, other in pair.run(refused, tmp_path):
        assert "'optimizer' (ZeroRedundancyOptimizer) cannot be restored with overlap_with_ddp=True" in overlapping
        assert "register the module too" in other


def restore_other_groups(ranks: RankGroup, root: Path) -> str:
    objects = make("adamw")
    parameters = objects["model"].parameters()
    objects["optimizer"] = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=0.1)
    del objects["scheduler"]
    with Attempt(root, ranks, objects, restart=1) as attempt, pytest.raises(CheckpointError) as raised:
        attempt.restore()
    return str(raised.value)


def test_groups_that_were_saved_with_different_options_do_not_become_one(tmp_path: Path, pair: Pair) -> None:
    pair.run(save, tmp_path, "adamw")
    for problem in pair.run(restore_other_groups, tmp_path):
        assert "parameters of one group have different options" in problem
