"""Activation checkpointing changes what is kept for the backward pass, and no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import rare
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slurmtrain.errors import StrategyError
from slurmtrain.model.experiment.strategy import ActivationCheckpointing, StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.strategy_interface import Strategy

WIDTH, STEPS = 8, 3


class Block(nn.Module):
    """A residual block with dropout, which must be the same when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def objects_of(ranks: RankGroup, spec: StrategySpec) -> dict[str, Any]:
    strategy = Strategy(spec, ranks, ranks.rank // 2)
    model = strategy.parallelize(Net())
    return {"model": model, "optimizer": strategy.optimizer(torch.optim.AdamW, model.parameters(), {"lr": 0.02})}


def train(ranks: RankGroup, objects: dict[str, Any], steps: range) -> tuple[list[float], int]:
    """The losses of this rank, and how many bytes a forward pass keeps, as far as no block computes them again."""
    losses, kept = [], 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    for step in steps:
        torch.manual_seed(10 * step + ranks.rank)
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = objects["model"](torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses, kept


def trained(ranks: RankGroup, spec: StrategySpec) -> tuple[list[float], int]:
    return train(ranks, objects_of(ranks, spec), range(STEPS))


@pytest.mark.parametrize("name", ["ddp", pytest.param("zero1", marks=rare), "fsdp", pytest.param("hsdp", marks=rare)])
def test_losses_are_the_same_bit_for_bit_with_less_memory(request: pytest.FixtureRequest, name: str) -> None:
    chosen, ranks = ActivationCheckpointing(), request.getfixturevalue("four" if name == "hsdp" else "two")
    whole = ranks.run(trained, StrategySpec(name=name))
    less = ranks.run(trained, StrategySpec(name=name, activation_checkpointing=chosen))
    for (losses, kept), (again, kept_less) in zip(whole, less, strict=True):
        assert losses == again
        assert kept_less < kept / 4


def test_it_goes_with_mixed_precision_and_another_strategy_restores_its_checkpoint(two: Pair, tmp_path: Path) -> None:
    chosen = ActivationCheckpointing(wrap=("Block",))
    for spec in (StrategySpec(mixed_precision="bf16"), StrategySpec(name="fsdp", wrap=("Block",))):
        more = replace(spec, activation_checkpointing=chosen)
        assert two.run(trained, spec)[0][0] == two.run(trained, more)[0][0]
    before = StrategySpec(name="fsdp", wrap=("Block",), activation_checkpointing=chosen)
    for losses, again in two.run(continued, tmp_path, before, StrategySpec(name="ddp")):
        assert losses == pytest.approx(again, rel=1e-5)


def continued(ranks: RankGroup, root: Path, before: StrategySpec, after: StrategySpec) -> tuple[list[float], ...]:
    """The losses after a checkpoint, with and without a restore under another strategy."""
    objects, others = objects_of(ranks, before), objects_of(ranks, after)
    train(ranks, objects, range(2))
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(2) == ""
    with Attempt(root, ranks, others, restart=1) as attempt:
        assert attempt.restore() is not None
    return train(ranks, objects, range(2, 4))[0], train(ranks, others, range(2, 4))[0]


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def recomputed(save: tuple[str, ...]) -> tuple[Counter[str], Any]:
    """The operators of a backward pass, and the gradient of a weight."""
    spec = StrategySpec(activation_checkpointing=ActivationCheckpointing(save=save))
    model = objects_of(alone(), spec)["model"]
    torch.manual_seed(1)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    with Calls() as calls:
        loss.backward()
    return calls.counts, model.blocks[0].inner[0].weight.grad


def test_the_results_of_chosen_operators_are_kept() -> None:
    (whole, gradient), (rest, same) = recomputed(()), recomputed(("addmm",))
    assert whole["aten.addmm.default"] > 0 == rest["aten.addmm.default"]
    assert whole["aten.gelu.default"] == rest["aten.gelu.default"] > 0
    assert torch.equal(gradient, same)


def test_names_and_classes_of_modules_stay_as_they_are() -> None:
    spec = StrategySpec(activation_checkpointing=ActivationCheckpointing())
    model = objects_of(alone(), spec)["model"]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert {type(block) for block in model.blocks} == {Block}


@pytest.mark.parametrize(
    ("make", "spec", "message"),
    [
        (Net, ActivationCheckpointing(wrap=("Blok",)), "no module of that class; did you mean 'Block'?"),
        (Net, ActivationCheckpointing(save=("matmull",)), "torch has no such operator"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), ActivationCheckpointing(), "consists of modules: name classes"),
    ],
)
def test_what_chooses_nothing_is_refused(
    make: Callable[[], nn.Module], spec: ActivationCheckpointing, message: str
) -> None:
    with pytest.raises(StrategyError) as error:
        Strategy(StrategySpec(activation_checkpointing=spec), alone(), 0).parallelize(make())
    assert message in str(error.value)
