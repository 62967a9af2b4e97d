"""Models that predict words, trained alone or by a strategy, as tests of strategies compare it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from helpers.ranks import Attempt, alone
from slurmtrain.model.experiment.strategy import StrategySpec
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.runtime.training.passes import LossOf
from slurmtrain.runtime.training.strategy_interface import Strategy

WORDS, LENGTH, BATCH, STEPS = 12, 4, 16, 3
# In float32 the order of summation differs: over these few steps by some units in the last place.
SAME = 1e-6
# Makes a model with weights that depend on a seed.
Make = Callable[[int], nn.Module]


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def strategy_of(ranks: RankGroup, spec: StrategySpec | None, microbatches: int = 1) -> Strategy:
    """A strategy on nodes of two ranks each."""
    return Strategy(spec, ranks, ranks.rank // 2, microbatches)


def objects_of(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    model = strategy.parallelize(model)
    return {"model": model, "optimizer": strategy.optimizer(torch.optim.AdamW, model.parameters(), {"lr": 0.02})}


def forward_backward(
    strategy: Strategy,
    model: nn.Module,
    loss_of: LossOf,
    batch: tuple[Any, Tensor],
    step: int = 0,
    microbatches: int = 1,
) -> Tensor:
    """The gradients and the loss of a step with microbatches of equal size."""

    def divide(rows: int) -> list[int]:
        return [rows // microbatches] * microbatches

    return strategy.forward_backward(model, loss_of, batch, step, microbatches=microbatches, divide=divide)


def train(
    ranks: RankGroup,
    strategy: Strategy,
    objects: dict[str, Any],
    steps: range = range(STEPS),
    *,
    accumulation: int = 1,
    plain: bool = False,
) -> list[float]:
    """The losses of the whole batch at these steps, and the norms of their gradients, which are clipped.

    ``plain``: by a loop that uses torch alone.
    """
    figures, model, optimizer = [], objects["model"], objects["optimizer"]
    for step in steps:
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        share = words[strategy.dp_rank :: strategy.dp_size]
        inputs, targets = share[:, :-1], share[:, 1:].contiguous()
        if plain:
            loss = loss_of(model(inputs), targets)
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            loss = forward_backward(strategy, model, loss_of, (inputs, targets), step, accumulation)
            norm = strategy.clip_grad_norm_(model.parameters(), 0.5, 2.0)
        optimizer.step()
        optimizer.zero_grad()
        figures += [sum(ranks.gather(loss.item())) / ranks.world_size, norm.item()]
    return figures


@cache
def expected(make: Make) -> list[float]:
    """The figures of one process."""
    strategy = strategy_of(alone(), None)
    return train(alone(), strategy, objects_of(strategy, make(1)))


def continue_with(
    ranks: RankGroup, root: Path, make: Make, before: StrategySpec, after: StrategySpec, plain: bool = False
) -> list[float]:
    """Train with one strategy, save, and go on with another one."""
    strategy = strategy_of(ranks, before)
    objects = objects_of(strategy, make(1))
    figures = train(ranks, strategy, objects, range(2), plain=plain)
    with Attempt(root, ranks, objects) as attempt:
        assert attempt.save(2) == ""
    strategy = strategy_of(ranks, after)
    others = objects_of(strategy, make(9))
    with Attempt(root, ranks, others, restart=1) as attempt:
        assert attempt.restore() is not None
    return figures + train(ranks, strategy, others, range(2, STEPS), plain=plain)
